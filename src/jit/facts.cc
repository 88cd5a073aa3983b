#include "jit/facts.h"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "onefold/error.h"

namespace onefold::jit {
namespace {

// Calls `use` with each line, without its end.
template <class Use>
void each_line(std::string_view text, Use use) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    use(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// The number in front of `unit`, 0 when there is none: "…, 256 bytes smem, …".
std::int64_t number_before(std::string_view line, std::string_view unit) {
  const std::size_t end = line.find(unit);
  if (end == std::string_view::npos) return 0;
  std::size_t begin = end;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
  std::int64_t number = 0;
  std::from_chars(line.data() + begin, line.data() + end, number);
  return number;
}

// Remarks of ptxas have numbers that drift between versions, so they are known by their words. The
// lines on resources are no remarks, and "info" without a number in parentheses is small talk.
bool is_remark(std::string_view line) {
  return contains(line, "warning") || contains(line, "serializ") || contains(line, "(C7") ||
         contains(line, "Potential Performance Loss");
}

// ---- JSON, as far as it goes here ----

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", c);
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string quoted(const std::vector<std::string>& texts) {
  std::string out = "[";
  for (const std::string& text : texts) out += (out.size() > 1 ? ", " : "") + quoted(text);
  return out + "]";
}

// Takes things off the front of a text; `ok` is false once something else stood there.
struct Reader {
  std::string_view rest;
  bool ok = true;

  void expect(std::string_view text) {
    ok = ok && rest.substr(0, text.size()) == text;
    if (ok) rest.remove_prefix(text.size());
  }

  std::string string() {
    std::string out;
    expect("\"");
    while (ok && !rest.empty() && rest.front() != '"') {
      char c = rest.front();
      rest.remove_prefix(1);
      if (c == '\\' && rest.substr(0, 3) == "u00" && rest.size() >= 5) {
        c = static_cast<char>(std::strtol(std::string(rest.substr(1, 4)).c_str(), nullptr, 16));
        rest.remove_prefix(5);
      } else if (c == '\\' && !rest.empty()) {
        c = rest.front();
        rest.remove_prefix(1);
      }
      out += c;
    }
    expect("\"");
    return out;
  }

  template <class T>
  T number() {
    T out{};
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), out);
    ok = ok && error == std::errc();
    if (ok) rest.remove_prefix(static_cast<std::size_t>(end - rest.data()));
    return out;
  }

  std::vector<std::string> strings() {
    std::vector<std::string> out;
    expect("[");
    while (ok && !rest.empty() && rest.front() != ']') {
      if (!out.empty()) expect(", ");
      out.push_back(string());
    }
    expect("]");
    return out;
  }

  void field(const char* name) {
    expect("  \"");
    expect(name);
    expect("\": ");
  }
  void end_of_field() { expect(",\n"); }

  void operator()(const char* name, std::string& value) {
    field(name), value = string(), end_of_field();
  }
  void operator()(const char* name, std::vector<std::string>& value) {
    field(name), value = strings(), end_of_field();
  }
  template <class T>
  void operator()(const char* name, T& value) {
    field(name), value = number<T>(), end_of_field();
  }
};

struct Writer {
  std::string text;

  void line(const char* name, const std::string& value) {
    text += concat("  \"", name, "\": ", value, ",\n");
  }
  void operator()(const char* name, const std::string& value) { line(name, quoted(value)); }
  void operator()(const char* name, const std::vector<std::string>& value) {
    line(name, quoted(value));
  }
  template <class T>
  void operator()(const char* name, T value) {
    char digits[40];  // to_chars knows no locale
    line(name, std::string(digits, std::to_chars(digits, digits + sizeof digits, value).ptr));
  }
};

// The fields in their order, for both directions.
template <class Visitor, class AnyBinary>
void visit(Visitor& visitor, AnyBinary& b) {
  visitor("name", b.name);
  visitor("digest", b.digest);
  visitor("nvrtc", b.nvrtc);
  visitor("entry", b.entry);
  visitor("target", b.target);
  visitor("options", b.options);
  visitor("registers", b.facts.registers);
  visitor("spill_store_bytes", b.facts.spill_store_bytes);
  visitor("spill_load_bytes", b.facts.spill_load_bytes);
  visitor("local_bytes", b.facts.local_bytes);
  visitor("static_shared_bytes", b.facts.static_shared_bytes);
  visitor("compile_seconds", b.facts.compile_seconds);
  visitor("warnings", b.facts.warnings);
}

}  // namespace

Facts parse_log(std::string_view log, std::string_view entry) {
  Facts facts;
  bool about_entry = false;
  each_line(log, [&](std::string_view line) {
    if (is_remark(line)) facts.warnings.emplace_back(line);
    if (contains(line, "Compiling entry function")) {
      about_entry = defines_entry(line, entry);
    } else if (about_entry && contains(line, "bytes stack frame")) {
      // One such line for the kernel and one for each function that was not inlined.
      facts.local_bytes += number_before(line, " bytes stack frame");
      facts.spill_store_bytes += number_before(line, " bytes spill stores");
      facts.spill_load_bytes += number_before(line, " bytes spill loads");
    } else if (about_entry && contains(line, " registers")) {
      facts.registers = static_cast<int>(number_before(line, " registers"));
      facts.static_shared_bytes = number_before(line, " bytes smem");
    }
  });
  return facts;
}

bool defines_entry(std::string_view log, std::string_view entry) {
  return contains(log, concat("Compiling entry function '", entry, "'"));
}

std::string write_facts(const Binary& binary) {
  Writer writer;
  visit(writer, binary);
  return "{\n" + writer.text;
}

bool read_facts(std::string_view text, Binary& binary) {
  Reader reader{text};
  reader.expect("{\n");
  visit(reader, binary);
  return reader.ok && reader.rest.empty();
}

std::string describe(const Facts& facts) {
  std::string text =
      concat(facts.registers, " registers, ", facts.spill_store_bytes, " bytes spilled, ",
             facts.static_shared_bytes, " bytes of static shared memory");
  for (const std::string& warning : facts.warnings) text += "\n  " + warning;
  return text;
}

}  // namespace onefold::jit
