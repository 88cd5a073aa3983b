// The plan is a pure function: what it must be equal over, what it must cover, how it may grow.

#include "plan/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/cpu.h"
#include "tests/algebra/random.h"

namespace onefold::test {
namespace {

// ---- questions that are planned and never executed ----

std::byte somewhere[64];

struct Question {
  Attention a;
  std::vector<std::int64_t> offsets_q, offsets_k;

  static Tensor rows(std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t d, DType dtype) {
    return Tensor::packed(somewhere, dtype, {b, s, h, d});
  }
  static Question dense(std::int64_t b, std::int64_t sq, std::int64_t sk, std::int64_t hq,
                        std::int64_t hk, std::int64_t d, DType dtype = DType::kFloat32) {
    Question question;
    question.a.q = rows(b, sq, hq, d, dtype);
    question.a.k = question.a.v = rows(b, sk, hk, d, dtype);
    return question;
  }
  static Question packed(const std::vector<std::pair<std::int64_t, std::int64_t>>& lengths,
                         std::int64_t hq, std::int64_t hk, std::int64_t d) {
    Question question;
    question.offsets_q = question.offsets_k = {0};
    for (const auto& [q, k] : lengths) {
      question.offsets_q.push_back(question.offsets_q.back() + q);
      question.offsets_k.push_back(question.offsets_k.back() + k);
    }
    question.a.q = Tensor::packed(somewhere, DType::kFloat32, {question.offsets_q.back(), hq, d});
    question.a.k = question.a.v =
        Tensor::packed(somewhere, DType::kFloat32, {question.offsets_k.back(), hk, d});
    return question;
  }
  Problem problem() {
    if (!offsets_q.empty()) {
      const auto count = static_cast<std::int64_t>(offsets_q.size());
      a.cu_seqlens_q = Tensor::packed(offsets_q.data(), DType::kInt64, {count});
      a.cu_seqlens_k = Tensor::packed(offsets_k.data(), DType::kInt64, {count});
    }
    return make_problem(a);
  }
};

// A machine of our own: sizes that tell their arguments apart.
CpuFacts fake_facts(int threads, std::int64_t l2_bytes = 1 << 20, int lanes = 48) {
  CpuFacts f;
  f.isa = "fake";
  f.threads = threads;
  f.l2_bytes = l2_bytes;
  f.lanes_float = lanes;
  f.lanes_double = lanes / 2;
  f.forward_scratch = [](const Problem& p, const Tiles& t, std::int64_t tiles) {
    return static_cast<std::size_t>((t.super_keys + tiles * t.rows) * (p.dim + p.dim_v) * 4);
  };
  f.backward_scratch = [](const Problem& p, const Tiles& t, const BackwardWants&, bool by_chunk,
                          std::int64_t chunks) {
    const std::int64_t keys = by_chunk ? 0 : p.longest_k * (chunks > 1 ? 2 : 1);
    return static_cast<std::size_t>((t.super_keys + keys) * (p.dim + p.dim_v) * 4);
  };
  f.chunk_bytes = [](const Problem& p) {
    return static_cast<std::size_t>(p.longest_k * (p.dim + p.dim_v) * 4);
  };
  f.partial_bytes = [](const Problem& p) {
    return static_cast<std::size_t>(kSplitRows * (p.dim_v + 2) * 4);
  };
  return f;
}

BackwardWants all_wanted() {
  BackwardWants w;
  w.dq = w.dkv = w.dslopes = w.dsinks = true;
  return w;
}

// ---- comparing ----

auto fields(const Item& x) {
  return std::tuple(x.b, x.kv_head, x.row_begin, x.row_end, x.key_begin, x.key_end, x.partial,
                    x.first, x.kv_heads, x.partial_step);
}
auto fields(const Split& x) { return std::tuple(x.b, x.kv_head, x.rows, x.first_partial, x.count); }
template <class T>
auto all_fields(const std::vector<T>& list) {
  std::vector<decltype(fields(list[0]))> result;
  for (const T& x : list) result.push_back(fields(x));
  return result;
}

void expect_equal(const CpuWork& x, const CpuWork& y) {
  EXPECT_EQ(all_fields(x.items), all_fields(y.items));
  EXPECT_EQ(all_fields(x.splits), all_fields(y.splits));
  const auto numbers = [](const CpuWork& w) {
    return std::tuple(w.tiles.rows, w.tiles.keys, w.tiles.super_keys, w.tiles_per_item,
                      w.partials_bytes, w.scratch_bytes, w.workers, w.by_chunk, w.chunk,
                      w.num_chunks, w.chunk_sums_bytes, w.number_sums_bytes, w.workspace_bytes);
  };
  EXPECT_EQ(numbers(x), numbers(y));
}

// Questions of every kind: dense, packed with empty sequences at every place, grouped heads,
// borders, a few rows against many keys.
Question draw_question(Random& random) {
  const std::int64_t hk = random.integer(1, 3), hq = hk * random.integer(1, 4);
  const std::int64_t d = random.integer(1, 130);
  const auto length = [&random](bool few) -> std::int64_t {
    if (random.chance(0.15)) return 0;
    return few ? random.integer(1, 6) : random.integer(1, random.chance(0.3) ? 5000 : 300);
  };
  Question question;
  if (random.chance(0.5)) {
    std::vector<std::pair<std::int64_t, std::int64_t>> lengths;
    for (int b = random.integer(0, 7); b > 0; --b) {
      lengths.emplace_back(length(random.chance(0.3)), length(false));
    }
    question = Question::packed(lengths, hq, hk, d);
  } else {
    question = Question::dense(random.integer(0, 4), length(random.chance(0.3)), length(false), hq,
                               hk, d, random.chance(0.3) ? DType::kFloat64 : DType::kFloat32);
  }
  question.a.causal = static_cast<Causal>(random.integer(0, 2));
  if (random.chance(0.3)) question.a.window_left = random.integer(-3, 1500);
  if (random.chance(0.2)) question.a.window_right = random.integer(-3, 1500);
  return question;
}

TEST(Plan, the_same_question_gets_the_same_plan) {
  for_random_cases(100, [](Random& random) {
    Question question = draw_question(random);
    const Problem p = question.problem(), again = question.problem();
    const CpuFacts facts = fake_facts(random.integer(1, 9));
    expect_equal(plan_forward(p, facts), plan_forward(again, facts));
    expect_equal(plan_backward(p, all_wanted(), facts), plan_backward(again, all_wanted(), facts));
    const CpuWork w = plan_forward(p, facts);
    EXPECT_EQ(describe_kernel(p, w, facts), describe_kernel(again, w, facts));
    EXPECT_EQ(describe_reasons(p, w, facts), describe_reasons(again, w, facts));
  });
}

// The items of single heads: an item of a split may serve several.
std::vector<Item> single_heads(const CpuWork& w) {
  std::vector<Item> items;
  for (const Item& item : w.items) {
    for (std::int64_t n = 0; n < item.kv_heads; ++n) {
      items.push_back(item);
      items.back().kv_head += n;
      items.back().partial += n * item.partial_step;
      items.back().kv_heads = 1;
    }
  }
  return items;
}

// What orders additions: the key tile, the stretches of a split, the chunks of queries.
struct Order {
  int keys;
  std::int64_t chunk, num_chunks;
  std::set<std::array<std::int64_t, 5>> stretches;  // b, head, begin, end, place in the split
  bool operator==(const Order&) const = default;
};
Order order_of(const Problem& p, const CpuFacts& facts) {
  const CpuWork forward = plan_forward(p, facts), backward = plan_backward(p, all_wanted(), facts);
  EXPECT_EQ(forward.tiles.keys, backward.tiles.keys);
  Order order{forward.tiles.keys, backward.chunk, backward.num_chunks, {}};
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> first;
  for (const Split& s : forward.splits) first[{s.b, s.kv_head}] = s.first_partial;
  for (const Item& item : single_heads(forward)) {
    if (item.partial < 0) continue;
    order.stretches.insert({item.b, item.kv_head, item.key_begin, item.key_end,
                            item.partial - first[{item.b, item.kv_head}]});
  }
  return order;
}

TEST(Plan, the_order_of_additions_depends_on_the_problem_alone) {
  for_random_cases(100, [](Random& random) {
    Question question = draw_question(random);
    const Problem p = question.problem();
    const Order order = order_of(p, fake_facts(1));
    for (const int threads : {2, 3, 7, 64, 1000}) {
      EXPECT_EQ(order_of(p, fake_facts(threads)), order) << threads << " threads";
    }
    for (const std::int64_t l2 : {std::int64_t{1}, std::int64_t{1} << 15, std::int64_t{1} << 30}) {
      EXPECT_EQ(order_of(p, fake_facts(4, l2)), order) << "L2 of " << l2;
    }
    for (const int lanes : {8, 16, 48}) {
      EXPECT_EQ(order_of(p, fake_facts(4, 1 << 20, lanes)), order) << lanes << " lanes";
    }
  });
}

// A row's stretches and chunks are its own sequence's: the rest of the batch does not move them.
TEST(Plan, stretches_of_a_sequence_do_not_depend_on_its_neighbours) {
  for_random_cases(100, [](Random& random) {
    std::vector<std::pair<std::int64_t, std::int64_t>> lengths;
    for (int b = random.integer(1, 5); b > 0; --b) {
      lengths.emplace_back(random.integer(1, random.chance(0.5) ? 4 : 200),
                           random.integer(0, 6000));
    }
    const auto stretches = [](const Order& order, std::int64_t b) {
      std::set<std::array<std::int64_t, 4>> own;
      for (const auto& s : order.stretches) {
        if (s[0] == b) own.insert({s[1], s[2], s[3], s[4]});
      }
      return own;
    };
    const Order together = order_of(Question::packed(lengths, 2, 2, 16).problem(), fake_facts(3));
    for (std::size_t b = 0; b < lengths.size(); ++b) {
      const Order alone =
          order_of(Question::packed({lengths[b]}, 2, 2, 16).problem(), fake_facts(3));
      EXPECT_EQ(stretches(together, static_cast<std::int64_t>(b)), stretches(alone, 0)) << b;
    }
  });
}

// ---- coverage ----

// Every row of every head exactly once; of a split, every key that a row may see exactly once.
void expect_covered(const Problem& p, const CpuWork& w) {
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<Item>> by_head;
  const std::vector<Item> all = single_heads(w);
  for (const Item& item : all) by_head[{item.b, item.kv_head}].push_back(item);
  std::map<std::pair<std::int64_t, std::int64_t>, Split> splits;
  std::set<std::int64_t> partials;
  for (const Split& s : w.splits) {
    EXPECT_TRUE((splits.insert({{s.b, s.kv_head}, s}).second));
    EXPECT_LE(s.rows, kSplitRows);
    EXPECT_GE(s.count, 2);
  }
  for (std::int64_t b = 0; b < static_cast<std::int64_t>(p.sequences.size()); ++b) {
    const Lengths used = p.sequences[static_cast<std::size_t>(b)].used;
    for (std::int64_t h = 0; h < p.heads_k; ++h) {
      SCOPED_TRACE("sequence " + std::to_string(b) + " head " + std::to_string(h));
      std::vector<Item>& items = by_head[{b, h}];
      const bool split = splits.contains({b, h});
      std::sort(items.begin(), items.end(), [](const Item& x, const Item& y) {
        return std::pair(x.row_begin, x.key_begin) < std::pair(y.row_begin, y.key_begin);
      });
      if (!split) {
        std::int64_t next = 0;
        for (const Item& item : items) {
          ASSERT_EQ(item.row_begin, next);
          ASSERT_GT(item.row_end, next);
          ASSERT_EQ(item.partial, -1);
          ASSERT_EQ(item.key_begin, 0);
          ASSERT_GE(item.key_end, used.k);
          next = item.row_end;
        }
        ASSERT_EQ(next, used.q * p.group);
        continue;
      }
      const Split& s = splits[{b, h}];
      ASSERT_EQ(s.rows, used.q * p.group);
      ASSERT_EQ(static_cast<std::int64_t>(items.size()), s.count);
      for (std::int64_t n = 0; n < s.count; ++n) {
        const Item& item = items[static_cast<std::size_t>(n)];
        ASSERT_EQ(item.row_begin, 0);
        ASSERT_EQ(item.row_end, s.rows);
        ASSERT_EQ(item.partial, s.first_partial + n);  // ascending keys in ascending places
        ASSERT_EQ(item.first, n == 0);
        ASSERT_LT(item.key_begin, item.key_end);
        ASSERT_EQ(item.key_begin % w.tiles.keys, 0);
        if (n > 0) {
          ASSERT_EQ(item.key_begin, items[static_cast<std::size_t>(n - 1)].key_end);
        }
        ASSERT_TRUE(partials.insert(item.partial).second);
      }
      const TileRange seen = kv_range(p.variant, used, 0, used.q);
      ASSERT_LE(items.front().key_begin, seen.begin);
      ASSERT_GE(items.back().key_end, seen.end);
    }
  }
  ASSERT_EQ(all.size(), [&] {
    std::size_t count = 0;
    for (const auto& [head, items] : by_head) count += items.size();
    return count;
  }());
  for (const auto& [head, items] : by_head) {
    ASSERT_LT(head.first, p.batch);
    ASSERT_LT(head.second, p.heads_k);
  }
  if (!partials.empty()) {
    ASSERT_EQ(*partials.begin(), 0);
    ASSERT_EQ(*partials.rbegin() + 1, static_cast<std::int64_t>(partials.size()));
  }
}

TEST(Plan, forward_items_cover_every_row_and_key_once) {
  for_random_cases(300, [](Random& random) {
    Question question = draw_question(random);
    const Problem p = question.problem();
    const CpuFacts facts =
        fake_facts(random.integer(1, 9), 1 << random.integer(14, 22), 16 * random.integer(1, 3));
    const CpuWork w = plan_forward(p, facts);
    expect_covered(p, w);
    EXPECT_EQ(w.partials_bytes, [&] {
      std::int64_t count = 0;
      for (const Split& s : w.splits) count += s.count;
      return static_cast<std::size_t>(count) * facts.partial_bytes(p);
    }());
    EXPECT_GE(w.workspace_bytes,
              w.partials_bytes + w.scratch_bytes * static_cast<std::size_t>(w.workers));
    EXPECT_LE(w.workers, facts.threads);
  });
}

TEST(Plan, backward_items_cover_every_chunk_of_every_head_once) {
  for_random_cases(300, [](Random& random) {
    Question question = draw_question(random);
    const Problem p = question.problem();
    const CpuFacts facts = fake_facts(random.integer(1, 9));
    const CpuWork w = plan_backward(p, all_wanted(), facts);
    std::set<std::array<std::int64_t, 3>> seen;
    for (const Item& item : w.items) {
      ASSERT_LT(item.b, p.batch);
      ASSERT_LT(item.kv_head, p.heads_k);
      const std::int64_t rows = p.sequences[static_cast<std::size_t>(item.b)].used.q;
      ASSERT_GT(rows, 0);
      if (w.by_chunk) {
        ASSERT_EQ(item.row_end, item.row_begin + 1);
        ASSERT_LT(item.row_begin * chunk_rows(rows), rows);
        ASSERT_LT(item.row_begin, w.num_chunks);
        ASSERT_TRUE((seen.insert({item.b, item.kv_head, item.row_begin}).second));
      } else {
        ASSERT_EQ(item.row_begin, 0);
        ASSERT_EQ(item.row_end, rows * p.group);
        ASSERT_TRUE((seen.insert({item.b, item.kv_head, 0}).second));
      }
    }
    std::size_t want = 0;
    for (const Sequence& s : p.sequences) {
      const std::int64_t rows = chunk_rows(s.used.q);
      const std::int64_t units = w.by_chunk ? (s.used.q + rows - 1) / rows : s.used.q > 0;
      want += static_cast<std::size_t>(units * p.heads_k);
    }
    EXPECT_EQ(seen.size(), want);
  });
}

TEST(Plan, heads_that_share_out_evenly_are_not_cut_into_chunks) {
  const auto by_chunk = [](std::int64_t heads, int threads) {
    Question question = Question::dense(1, 4096, 4096, heads, heads, 64);
    return plan_backward(question.problem(), all_wanted(), fake_facts(threads)).by_chunk;
  };
  EXPECT_FALSE(by_chunk(2, 2));
  EXPECT_TRUE(by_chunk(3, 2));
  EXPECT_TRUE(by_chunk(2, 4));
  EXPECT_FALSE(by_chunk(9, 4));
}

TEST(Plan, backward_without_a_main_pass_has_no_items) {
  Question question = Question::dense(2, 100, 100, 2, 2, 16);
  BackwardWants only_bias;
  only_bias.dbias = only_bias.dbias_broadcast = true;
  EXPECT_TRUE(plan_backward(question.problem(), only_bias, fake_facts(2)).items.empty());
  EXPECT_TRUE(plan_backward(question.problem(), {}, fake_facts(2)).items.empty());
}

// Ascending indices go to whoever is free: the longest item first. An item's length is the number
// of rows times the keys between the first and the last that one of them sees, counted one by one.
TEST(Plan, the_longest_items_come_first) {
  for_random_cases(60, [](Random& random) {
    Question question = draw_question(random);
    const Problem p = question.problem();
    const CpuWork w = plan_forward(p, fake_facts(random.integer(2, 9)));
    std::int64_t previous = std::numeric_limits<std::int64_t>::max();
    for (const Item& item : w.items) {
      const Lengths used = p.sequences[static_cast<std::size_t>(item.b)].used;
      std::int64_t first = used.k, last = 0;
      for (std::int64_t r = item.row_begin; r < item.row_end; ++r) {
        const KeyInterval keys = key_interval(p.variant, used, r / p.group);
        if (keys.empty()) continue;
        first = std::min(first, keys.begin);
        last = std::max(last, keys.end);
      }
      first = std::max(first, item.key_begin);
      last = std::min(last, item.key_end);
      const std::int64_t length =
          last > first ? (last - first) * (item.row_end - item.row_begin) * item.kv_heads : 0;
      if (p.variant.banded() || p.sequences.size() > 1) {
        ASSERT_LE(length, previous);
      }
      previous = length;
    }
  });
}

// ---- growth ----

TEST(Plan, a_head_has_at_most_eight_chunks) {
  for (const std::int64_t length : {1, 511, 512, 513, 4095, 4096, 4097, 65537, 1 << 20}) {
    Question question = Question::dense(1, length, 64, 1, 1, 64);
    const CpuWork w = plan_backward(question.problem(), all_wanted(), fake_facts(16));
    EXPECT_LE(w.num_chunks, 8) << length;
    EXPECT_GE(w.num_chunks * w.chunk, length);
    EXPECT_LT((w.num_chunks - 1) * w.chunk, length);
  }
}

TEST(Plan, a_longer_sequence_has_no_fewer_chunks) {
  std::int64_t before = 0;
  for (std::int64_t length = 0; length < 200000; length += 7) {
    const std::int64_t chunks = (length + chunk_rows(length) - 1) / chunk_rows(length);
    ASSERT_GE(chunks, before) << length;
    before = chunks;
  }
}

// Up to a million of each, with the kernels' own sizes: forward not at all, backward with the keys.
TEST(Plan, workspace_does_not_grow_with_queries_times_keys) {
  for (const int threads : {1, 2, 16}) {
    const CpuFacts facts = cpu::facts(threads);
    for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
      for (const bool causal : {false, true}) {
        std::size_t forward_before = 0, backward_before = 0;
        std::int64_t tiles_before = 0;
        for (std::int64_t n = 1 << 14; n <= 1 << 20; n *= 2) {
          SCOPED_TRACE(concat(threads, " threads, ", n, " queries and keys, ", name(dtype)));
          Question question = Question::dense(1, n, n, 2, 1, 64, dtype);
          question.a.causal = causal ? Causal::kBottomRight : Causal::kNone;
          const Problem p = question.problem();
          const CpuWork work = plan_forward(p, facts);
          const std::size_t forward = work.workspace_bytes;
          const std::size_t backward = plan_backward(p, all_wanted(), facts).workspace_bytes;
          if (forward_before > 0) {
            // Caches set it, not lengths, once there are items enough for all threads.
            if (work.tiles_per_item == tiles_before) {
              EXPECT_EQ(forward, forward_before);
            }
            EXPECT_TRUE(n < 1 << 20 || work.tiles_per_item == tiles_before);
            EXPECT_LE(backward, 2 * backward_before);
          }
          forward_before = forward;
          tiles_before = work.tiles_per_item;
          backward_before = backward;
          // Private dK and dV: as many as workers (twice: a chunk and a total) or chunks.
          const auto sums =
              static_cast<std::size_t>(n) * 2 * 64 * static_cast<std::size_t>(size_bytes(dtype));
          EXPECT_LE(backward,
                    std::max(2 * static_cast<std::size_t>(threads), std::size_t{8}) * sums +
                        (std::size_t{1} << 23) * static_cast<std::size_t>(threads));
        }
      }
    }
  }
}

TEST(Plan, decoding_needs_memory_for_its_stretches_alone) {
  const CpuFacts facts = cpu::facts(4);
  Question question = Question::dense(1, 1, 1 << 20, 8, 8, 128);
  const CpuWork w = plan_forward(question.problem(), facts);
  EXPECT_FALSE(w.splits.empty());
  // Far less than a copy of K or V.
  EXPECT_LT(w.workspace_bytes, (std::size_t{1} << 20) * 8 * 128 * 4 / 16);
}

// ---- size ----

TEST(Plan, more_than_65535_batches_or_heads_are_covered) {
  for (const auto& [b, h] : {std::pair{70000, 1}, {1, 70000}, {300, 300}}) {
    Question question = Question::dense(b, 3, 5, h, h, 8);
    const Problem p = question.problem();
    const CpuWork forward = plan_forward(p, fake_facts(2));
    EXPECT_EQ(forward.items.size(), static_cast<std::size_t>(b) * static_cast<std::size_t>(h));
    const CpuWork backward = plan_backward(p, all_wanted(), fake_facts(2));
    EXPECT_EQ(backward.items.size(), static_cast<std::size_t>(b) * static_cast<std::size_t>(h));
    std::set<std::pair<std::int64_t, std::int64_t>> seen;
    for (const Item& item : forward.items) seen.insert({item.b, item.kv_head});
    EXPECT_EQ(seen.size(), forward.items.size());
  }
}

TEST(Plan, empty_problems_have_no_items) {
  for (Question question : {Question::dense(0, 3, 5, 2, 2, 8), Question::dense(2, 0, 5, 2, 2, 8),
                            Question::dense(2, 3, 5, 0, 0, 8), Question::packed({}, 2, 2, 8),
                            Question::packed({{0, 5}, {0, 0}}, 2, 2, 8)}) {
    const Problem p = question.problem();
    EXPECT_TRUE(plan_forward(p, fake_facts(2)).items.empty());
    EXPECT_TRUE(plan_backward(p, all_wanted(), fake_facts(2)).items.empty());
  }
}

TEST(Plan, tiles_are_whole_and_fit) {
  for (const std::int64_t d : {1, 64, 256, 576, 100000}) {
    for (const std::int64_t l2 : {1 << 10, 1 << 18, 1 << 21}) {
      Question question = Question::dense(1, 100, 5000, 1, 1, d);
      const Tiles t = plan_forward(question.problem(), fake_facts(2, l2)).tiles;
      EXPECT_GE(t.super_keys, t.keys);
      EXPECT_EQ(t.super_keys % t.keys, 0);
      if (t.super_keys > t.keys) {
        EXPECT_LE(t.super_keys * 2 * d * 4, l2);
      }
    }
  }
}

// ---- what explain prints ----

TEST(Plan, reasons_name_what_was_asked_and_what_slows_it_down) {
  Question question = Question::dense(1, 4, 5000, 2, 2, 16);
  const auto reasons = [&](int threads) {
    const Problem p = question.problem();
    const CpuFacts facts = fake_facts(threads);
    return describe_reasons(p, plan_forward(p, facts), facts) +
           describe_reasons(p, plan_backward(p, all_wanted(), facts), facts);
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  const std::string plain = reasons(1);
  EXPECT_TRUE(has(plain, "split into stretches")) << plain;
  EXPECT_TRUE(has(plain, "only scaled")) << plain;
  for (const char* absent : {"causal or window", "mask:", "bias:", "dropout", "last stride"}) {
    EXPECT_FALSE(has(plain, absent)) << absent;
  }
  question = Question::dense(1, 5000, 50, 1, 1, 16);
  question.a.causal = Causal::kTopLeft;
  question.a.dropout_p = 0.5;
  question.a.k.stride[3] = 2;
  question.a.mask = Tensor::packed(somewhere, DType::kBool, {1});
  question.a.bias = Tensor::packed(somewhere, DType::kFloat32, {1});
  const std::string full = reasons(8);
  for (const char* present :
       {"causal or window", "mask:", "bias:", "dropout", "last stride of k is 2",
        "backward over 8 chunks", "scaling is a step of its own"}) {
    EXPECT_TRUE(has(full, present)) << present << " in\n" << full;
  }
}

TEST(Plan, the_path_of_few_rows_is_named_and_so_is_why_it_is_not_decoding) {
  const CpuFacts facts = cpu::facts(1);
  struct Case {
    std::int64_t queries, keys, dim;
    DType dtype;
    const char *kernel, *reason;
  };
  for (const Case& c : {
           Case{4, 100, 64, DType::kFloat32, "decoding ", "in place"},
           {4, 5000, 64, DType::kFloat32, "keys split every 1024", "in place"},
           {4, 100, 31, DType::kFloat32, "tiled ", "not decoding: head dims are not multiples of"},
           {4, 100, 64, DType::kFloat64, "tiled ", "not decoding: float64 is computed in tiles"},
           {9, 100, 64, DType::kFloat32, "tiled ", "not decoding: more than 8 rows"},
       }) {
    SCOPED_TRACE(c.reason);
    Question question = Question::dense(1, c.queries, c.keys, 1, 1, c.dim);
    for (Tensor* t : {&question.a.q, &question.a.k, &question.a.v}) t->dtype = c.dtype;
    const Problem p = question.problem();
    const CpuWork w = plan_forward(p, facts);
    const std::string kernel = describe_kernel(p, w, facts);
    const std::string reasons = describe_reasons(p, w, facts);
    EXPECT_NE(kernel.find(c.kernel), std::string::npos) << kernel;
    EXPECT_NE(reasons.find(c.reason), std::string::npos) << reasons;
  }
}

}  // namespace
}  // namespace onefold::test
