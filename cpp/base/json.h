// SPDX-License-Identifier: Apache-2.0
// Writes the small JSON reports of the tools. Writing only: nothing in the core reads JSON.
#pragma once

#include <concepts>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>

namespace tardis {

// A number that no integer type holds.
struct JsonNumber {
  std::string digits;
};

class JsonWriter {
 public:
  void begin_object() { open('{'); }
  void end_object() { close('}'); }
  void begin_array(std::string_view name) { key(name), open('['); }
  void begin_array() { open('['); }
  void end_array() { close(']'); }

  template <class T>
  void field(std::string_view name, const T& item) {
    key(name);
    put(item);
  }
  template <class T>
  void value(const T& item) {
    separate();
    put(item);
  }

  const std::string& text() const { return text_; }

 private:
  void separate() {
    if (!text_.empty() && text_.back() != '{' && text_.back() != '[') text_ += ',';
  }
  void open(char bracket) {
    if (!text_.empty() && text_.back() != ':') separate();
    text_ += bracket;
  }
  void close(char bracket) { text_ += bracket; }
  void key(std::string_view name) {
    separate();
    quote(name);
    text_ += ':';
  }
  void put(bool item) { text_ += item ? "true" : "false"; }
  template <std::integral T>
  void put(T item) {
    text_ += std::to_string(item);
  }
  template <class T>
  void put(const std::optional<T>& item) {
    if (item) {
      put(*item);
    } else {
      text_ += "null";
    }
  }
  void put(const JsonNumber& item) { text_ += item.digits; }
  void put(const std::string& item) { quote(item); }
  void put(const char* item) { quote(item); }
  void quote(std::string_view item) {
    text_ += '"';
    for (const char c : item) {
      const auto byte = static_cast<unsigned char>(c);
      if (c == '"' || c == '\\') {
        text_ += '\\';
        text_ += c;
      } else if (byte < 0x20) {
        char escaped[8];
        std::snprintf(escaped, sizeof escaped, "\\u%04x", byte);
        text_ += escaped;
      } else {
        text_ += c;
      }
    }
    text_ += '"';
  }

  std::string text_;
};

}  // namespace tardis
