// SPDX-License-Identifier: Apache-2.0
// What the C ABI under `tardis nvme` answers, of the first controller.
#pragma once

#include <cstdio>
#include <initializer_list>
#include <string>

#include "guest_support.h"
#include "tardis/nvme.h"

namespace tardis::nvme::testing {

struct Answer {
  tardis_code code;
  std::string text;  // JSON, or the error

  bool has(const std::string& part) const { return text.find(part) != std::string::npos; }
};

template <class Call>
Answer ask(Call call) {
  char *json = nullptr, *error = nullptr;
  const tardis_code code = call(&json, &error);
  Answer answer{code, code == TARDIS_OK ? json : error};
  std::printf("%s\n", answer.text.c_str());
  tardis_free(json);
  tardis_free(error);
  return answer;
}
inline void expect_has(const Answer& answer, std::initializer_list<const char*> parts) {
  for (const char* const part : parts) EXPECT_TRUE(answer.has(part)) << "no '" << part << "' in " << answer.text;
}

inline std::string drive() { return guest_controllers().at(0); }
inline Answer list() {
  return ask([](char** json, char** error) { return tardis_nvme_list(nullptr, json, error); });
}
inline Answer release(const char* to, bool carry_out) {
  return ask([&](char** json, char** error) {
    return tardis_nvme_release(nullptr, drive().c_str(), to, carry_out ? 1 : 0, json, error);
  });
}

}  // namespace tardis::nvme::testing
