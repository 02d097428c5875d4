// SPDX-License-Identifier: Apache-2.0
// Exists so that the precompiled libtorch header has a target that owns it.
