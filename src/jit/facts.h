// What is known about a compiled program, out of the compiler's log and in and out of facts.json.
//
// Invariant: read_facts(write_facts(b)) gives b again, but for the cubin and where it came from.
// Includes jit.h.
#pragma once

#include <string>
#include <string_view>

#include "jit/jit.h"

namespace onefold::jit {

// The part of NVRTC's log (with --ptxas-options=-v) that is about the kernel `entry`.
Facts parse_log(std::string_view log, std::string_view entry);

// Whether the log tells of a kernel of this name.
bool defines_entry(std::string_view log, std::string_view entry);

// A JSON object, one field a line, still open: the store adds the checksum and the end.
std::string write_facts(const Binary& binary);

// False unless `text` is what write_facts writes.
bool read_facts(std::string_view text, Binary& binary);

// "168 registers, 0 bytes spilled, 1024 bytes of static shared memory".
std::string describe(const Facts& facts);

}  // namespace onefold::jit
