// SPDX-License-Identifier: Apache-2.0
// Errors as values. Nothing in cpp/ throws across a module boundary; exceptions begin at the Python edge.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <variant>

namespace tardis {

// The numeric values are part of the C ABI (tardis.h): append only.
enum class Code : int {
  kOk = 0,
  kInvalidArgument = 1,    // a setting or a call is wrong; the message names it
  kNotFound = 2,           // a path or an object is missing
  kIo = 3,                 // the operating system refused; the message carries strerror
  kCorrupt = 4,            // bytes on disk fail their own check
  kBusy = 5,               // another process or thread owns it
  kNoSpace = 6,            // capacity, free-space floor or disk full
  kUnsupportedFormat = 7,  // written by a newer release
  kPermission = 8,
  kClosed = 9,
  kInternal = 10,
};

struct Error {
  Code code;
  std::string message;  // what was expected, what was found, what to do
  int os_error = 0;     // errno, if the operating system said so
};

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}
  Result(Error error) : state_(std::move(error)) {}

  explicit operator bool() const { return std::holds_alternative<T>(state_); }
  T& operator*() { return std::get<T>(state_); }
  const T& operator*() const { return std::get<T>(state_); }
  T* operator->() { return &std::get<T>(state_); }
  const T* operator->() const { return &std::get<T>(state_); }
  const Error& error() const { return std::get<Error>(state_); }

 private:
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}

  explicit operator bool() const { return !error_.has_value(); }
  const Error& error() const { return *error_; }

 private:
  std::optional<Error> error_;
};

using Status = Result<void>;

// "context: strerror(errno_value)", with the code that errno_value stands for.
Error errno_error(int errno_value, std::string context);

}  // namespace tardis
