// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/rpc/pem_files.h"

#include <ctime>
#include <fstream>
#include <iterator>
#include <memory>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::ps {

namespace {

using Bio = std::unique_ptr<BIO, decltype(&::BIO_free)>;
using Certificate = std::unique_ptr<X509, decltype(&::X509_free)>;
using Key = std::unique_ptr<EVP_PKEY, decltype(&::EVP_PKEY_free)>;

[[noreturn]] void not_pem(const std::string& what, const std::string& path) {
  throw ConfigError(path + ": expected the " + what + " in PEM form");
}

std::string read_pem(const std::string& what, const std::string& path) {
  if (path.empty()) return "";
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file || text.find("-----BEGIN ") == std::string::npos) not_pem(what, path);
  return text;
}

void check_all_named(const SecurityOptions& security) {
  std::string missing;
  int count = 0;
  for (const auto& [flag, path] : {std::pair("--tls-authority", &security.authority),
                                   std::pair("--tls-certificate", &security.certificate),
                                   std::pair("--tls-key", &security.key)}) {
    if (!path->empty()) continue;
    missing += (count++ == 0 ? "" : " and ") + std::string(flag);
  }
  if (count > 0)
    throw ConfigError("TLS: expected all three files: " + missing +
                      (count == 1 ? " is missing" : " are missing"));
}

Bio open(const std::string& text) {
  return {::BIO_new_mem_buf(text.data(), static_cast<int>(text.size())), ::BIO_free};
}

Certificate parse_certificate(const std::string& text, const std::string& path) {
  const Bio bio = open(text);
  Certificate certificate(::PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr), ::X509_free);
  if (!certificate) not_pem("certificate", path);
  return certificate;
}

Key parse_key(const std::string& text, const std::string& path) {
  const Bio bio = open(text);
  char no_password[] = "";  // Without it OpenSSL would ask at the terminal.
  Key key(::PEM_read_bio_PrivateKey(bio.get(), nullptr, nullptr, no_password), ::EVP_PKEY_free);
  if (!key) not_pem("key, without a password,", path);
  return key;
}

std::string date_of(const ASN1_TIME* time) {
  std::tm date{};
  ::ASN1_TIME_to_tm(time, &date);
  char text[32];
  return {text, std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S UTC", &date)};
}

void check_dates(X509* certificate, const std::string& path) {
  const ASN1_TIME* const end = ::X509_get0_notAfter(certificate);
  if (::X509_cmp_current_time(end) < 0)
    throw ConfigError(path + ": the certificate expired on " + date_of(end));
  const ASN1_TIME* const begin = ::X509_get0_notBefore(certificate);
  if (::X509_cmp_current_time(begin) > 0)
    throw ConfigError(path + ": the certificate is not valid before " + date_of(begin));
}

}  // namespace

PemFiles read_pem_files(const SecurityOptions& security) {
  PemFiles files{.authority = read_pem("authority's certificate", security.authority),
                 .certificate = read_pem("certificate", security.certificate),
                 .key = read_pem("key", security.key)};
  check_all_named(security);
  const Certificate certificate = parse_certificate(files.certificate, security.certificate);
  const Key key = parse_key(files.key, security.key);
  const bool fits = ::X509_check_private_key(certificate.get(), key.get()) == 1;
  ::ERR_clear_error();  // gRPC would find it in this thread's queue.
  if (!fits)
    throw ConfigError(security.key + ": expected the key of the certificate " +
                      security.certificate);
  check_dates(certificate.get(), security.certificate);
  return files;
}

void check_server_name(const SecurityOptions& security, const PemFiles& files) {
  const Certificate certificate = parse_certificate(files.certificate, security.certificate);
  std::string names;
  for (const std::string& name : security.server_names) {
    if (::X509_check_host(certificate.get(), name.data(), name.size(), 0, nullptr) == 1) return;
    names += (names.empty() ? "" : " or ") + name;
  }
  if (!names.empty())
    throw ConfigError(security.certificate + ": expected a certificate with the name " + names +
                      " (--tls-server-names)");
}

}  // namespace cohort::ps
