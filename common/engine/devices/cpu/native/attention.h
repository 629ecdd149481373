// Attention of single new tokens that reads KV blocks where they lie. No result depends on the number of threads or on
// what else is in the batch.

#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "elementwise.h"

// One query token of one KV head's group of query heads over the sequence's blocks.
// DIM and GROUP are compile-time constants where nonzero, so that loops over them unroll into registers.
template <typename T, int DIM, int GROUP>
struct Group {
    int64_t dim_, group_;
    int64_t dim() const { return DIM ? DIM : dim_; }
    int64_t group() const { return GROUP ? GROUP : group_; }

    // scores[g * stride + t] = queries[g] . keys[t] for the tokens of one block
    void score(float* scores, int64_t stride, const float* queries, const T* keys, int64_t token_stride,
               int64_t num_tokens) const {
        for (int64_t t = 0; t < num_tokens; ++t) {
            const T* key = keys + t * token_stride;
            for (int64_t g = 0; g < group(); ++g) {
                const float* query = queries + g * dim();
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (int64_t d = 0; d < dim(); ++d) sum += query[d] * load(key[d]);
                scores[g * stride + t] = sum;
            }
        }
    }

    // sums[g] += weights[g * stride + t] * values[t]; four tokens at a time quarter the traffic of the sums
    void accumulate(float* sums, const float* weights, int64_t stride, const T* values, int64_t token_stride,
                    int64_t num_tokens) const {
        int64_t t = 0;
        for (; t + 4 <= num_tokens; t += 4) {
            const T* value = values + t * token_stride;
            for (int64_t g = 0; g < group(); ++g) {
                const float* w = weights + g * stride + t;
                float* sum = sums + g * dim();
#pragma omp simd
                for (int64_t d = 0; d < dim(); ++d)
                    sum[d] += w[0] * load(value[d]) + w[1] * load(value[token_stride + d]) +
                              w[2] * load(value[2 * token_stride + d]) + w[3] * load(value[3 * token_stride + d]);
            }
        }
        for (; t < num_tokens; ++t) {
            const T* value = values + t * token_stride;
            for (int64_t g = 0; g < group(); ++g) {
                float* sum = sums + g * dim();
                float w = weights[g * stride + t];
#pragma omp simd
                for (int64_t d = 0; d < dim(); ++d) sum[d] += w * load(value[d]);
            }
        }
    }
};

// Scores to unnormalized weights, in place; returns their sum.
inline float soften(float* scores, int64_t count) {
    float best = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : best)
    for (int64_t i = 0; i < count; ++i) best = std::max(best, scores[i]);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) {
        scores[i] = exp_fast(scores[i] - best);
        sum += scores[i];
    }
    return sum;
}

template <typename T>
struct Cache { const T *k, *v; int64_t block_size; };

// Tokens [first, last) of one sequence, and of each the KV heads [first_head, last_head); blocks are read once each, in
// the order of the table.
template <typename T, int DIM, int GROUP>
void attend_sequence(T* out, const T* q, Cache<T> cache, Heads heads, const int32_t* blocks, int64_t first,
                     int64_t last, float scale, int64_t first_head, int64_t last_head) {
    static thread_local std::vector<float> scratch;
    Group<T, DIM, GROUP> parts{heads.head_dim, heads.num_heads / heads.num_kv_heads};
    const int64_t dim = parts.dim(), group = parts.group(), per_head = group * dim;
    const int64_t num_heads = last_head - first_head, token_stride = heads.num_kv_heads * dim;
    const int64_t num_tokens = last - first;
    scratch.assign(num_heads * (2 * per_head + group * num_tokens), 0.0f);
    float *queries = scratch.data(), *sums = queries + num_heads * per_head, *scores = sums + num_heads * per_head;
    for (int64_t i = 0; i < num_heads * per_head; ++i) queries[i] = load(q[first_head * per_head + i]) * scale;
    auto each_block = [&](auto visit) {
        for (int64_t token = first, count; token < last; token += count) {
            const int64_t within = token % cache.block_size;
            count = std::min(cache.block_size - within, last - token);
            int64_t at = (int64_t(blocks[token / cache.block_size]) * cache.block_size + within) * token_stride;
            for (int64_t head = 0; head < num_heads; ++head)
                visit(head, at + (first_head + head) * dim, scores + head * group * num_tokens + token - first, count);
        }
    };
    each_block([&](int64_t head, int64_t at, float* s, int64_t count) {
        parts.score(s, num_tokens, queries + head * per_head, cache.k + at, token_stride, count);
    });
    for (int64_t row = 0; row < num_heads * group; ++row) {
        float inverse = 1.0f / soften(scores + row * num_tokens, num_tokens);
        for (int64_t i = 0; i < num_tokens; ++i) scores[row * num_tokens + i] *= inverse;
    }
    each_block([&](int64_t head, int64_t at, float* s, int64_t count) {
        parts.accumulate(sums + head * per_head, s, num_tokens, cache.v + at, token_stride, count);
    });
    for (int64_t i = 0; i < num_heads * per_head; ++i) store(out[first_head * per_head + i], sums[i]);
}

template <typename T>
using Attend = void (*)(T*, const T*, Cache<T>, Heads, const int32_t*, int64_t, int64_t, float, int64_t, int64_t);

template <typename T, int DIM>
Attend<T> with_group(int64_t group) {
    switch (group) {
        case 1: return attend_sequence<T, DIM, 1>;
        case 2: return attend_sequence<T, DIM, 2>;
        case 3: return attend_sequence<T, DIM, 3>;
        case 4: return attend_sequence<T, DIM, 4>;
        case 8: return attend_sequence<T, DIM, 8>;
        default: return attend_sequence<T, DIM, 0>;
    }
}

template <typename T>
Attend<T> attend_for(Heads heads) {
    int64_t group = heads.num_heads / heads.num_kv_heads;
    if (heads.head_dim == 64) return with_group<T, 64>(group);
    if (heads.head_dim == 128) return with_group<T, 128>(group);
    return attend_sequence<T, 0, 0>;
}

// The sequences of a step; see AttentionBatch.
struct Sequences {
    const int32_t *cu_seqlens, *seq_lens, *block_tables;
    int64_t table_stride, num_seqs;

    int64_t num_new(int64_t seq) const { return cu_seqlens[seq + 1] - cu_seqlens[seq]; }
    const int32_t* blocks(int64_t seq) const { return block_tables + seq * table_stride; }
};

// Sequences with one new token; others are left alone. A task is a whole sequence where there are enough of them, so
// that its blocks are read from end to end, else a single KV head.
template <typename T>
struct DecodeTasks {
    T* out;
    const T* q;
    Cache<T> cache;
    Heads heads;
    Sequences sequences;
    int64_t window;  // of the new token and those before it, how many it sees; 0 = all
    float scale;
    int64_t heads_per_task;
    Attend<T> attend;

    DecodeTasks(T* out, const T* q, Cache<T> cache, Heads heads, Sequences sequences, int64_t window, float scale,
                int num_threads, Attend<T> attend)
        : out(out), q(q), cache(cache), heads(heads), sequences(sequences), window(window), scale(scale),
          heads_per_task(sequences.num_seqs >= 4 * num_threads || num_threads == 1 ? heads.num_kv_heads : 1),
          attend(attend) {}

    int64_t count() const { return sequences.num_seqs * (heads.num_kv_heads / heads_per_task); }

    void run(int64_t task) const {
        int64_t tasks_per_seq = heads.num_kv_heads / heads_per_task;
        int64_t seq = task / tasks_per_seq, head = task % tasks_per_seq * heads_per_task;
        if (sequences.num_new(seq) != 1) return;
        int64_t row = sequences.cu_seqlens[seq] * heads.num_heads * heads.head_dim;
        int64_t last = sequences.seq_lens[seq], first = window ? std::max<int64_t>(0, last - window) : 0;
        attend(out + row, q + row, cache, heads, sequences.blocks(seq), first, last, scale, head,
               head + heads_per_task);
    }
};

template <typename T>
void decode_attention(const DecodeTasks<T>& tasks, int num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
    for (int64_t task = 0; task < tasks.count(); ++task) tasks.run(task);
}
