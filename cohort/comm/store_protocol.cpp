// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/store_protocol.h"

#include <c10/util/Exception.h>
#include <cstring>

#include "cohort/base/secret.h"

namespace cohort::comm {
namespace {

using Length = uint32_t;

void put_length(std::string& text, size_t size) {
  const auto length = static_cast<Length>(size);
  text.append(reinterpret_cast<const char*>(&length), sizeof length);
}

size_t length_at(std::string_view bytes) {
  Length length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  return length;
}

[[noreturn]] void refuse() {
  C10_THROW_ERROR(DistNetworkError, "received something else than a message of a store");
}

}  // namespace

std::string store_proof(const std::string& secret, const std::string& role,
                        std::string_view client_nonce, std::string_view server_nonce) {
  std::string text = "cohort store 1 " + role + " ";
  text.append(client_nonce).append(" ").append(server_nonce);
  return hmac_sha256(secret, text);
}

std::string frame_of(StoreWord kind, const std::vector<std::string_view>& fields) {
  size_t size = 1;
  for (const std::string_view field : fields) size += sizeof(Length) + field.size();
  TORCH_CHECK_VALUE(size <= kLongestStoreMessage, "store: expected at most ", kLongestStoreMessage,
                    " bytes in one message, got ", size);
  std::string text;
  text.reserve(sizeof(Length) + size);
  put_length(text, size);
  text += static_cast<char>(kind);
  for (const std::string_view field : fields) {
    put_length(text, field.size());
    text += field;
  }
  return text;
}

std::optional<StoreMessage> first_message(std::string_view bytes) {
  if (bytes.size() < sizeof(Length)) return std::nullopt;
  const size_t size = length_at(bytes);
  if (size == 0 || size > kLongestStoreMessage) refuse();
  if (bytes.size() < sizeof(Length) + size) return std::nullopt;
  std::string_view body = bytes.substr(sizeof(Length), size);
  const auto kind = static_cast<uint8_t>(body.front());
  if (kind > static_cast<uint8_t>(StoreWord::kRefused)) refuse();
  StoreMessage message{
      .kind = static_cast<StoreWord>(kind), .fields = {}, .size = sizeof(Length) + size};
  for (body.remove_prefix(1); !body.empty();) {
    if (body.size() < sizeof(Length) || body.size() - sizeof(Length) < length_at(body)) refuse();
    message.fields.push_back(body.substr(sizeof(Length), length_at(body)));
    body.remove_prefix(sizeof(Length) + message.fields.back().size());
  }
  return message;
}

}  // namespace cohort::comm
