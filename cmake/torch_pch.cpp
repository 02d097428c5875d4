// Exists so that the precompiled libtorch header has a target that owns it.
