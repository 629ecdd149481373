// What torch has no fast operator for on CPUs: attention of single tokens that reads KV blocks where they lie, and the
// element-wise work between the products, each in one pass. Called through ctypes; every pointer and stride is checked
// by the caller. Sums are in float32; a bfloat16 result is rounded once, at the end. No result depends on the number of
// threads or on what else is in the batch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

struct bfloat16 { uint16_t bits; };

inline float load(float x) { return x; }

inline float load(bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline void store(float& target, float value) { target = value; }

// Round to nearest even; NaN stays NaN.
inline void store(bfloat16& target, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    target.bits = uint16_t(value == value ? rounded : 0x7FC0);
}

// e^x by range reduction and a polynomial of degree 6 (Cephes expf): within 2 ulp, NaN stays NaN, vectorizes.
inline float exp_fast(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = std::floor(x * 1.44269504088896341f + 0.5f);
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

template <typename T>
void add_rms_norm(T* out, T* total, const T* x, const T* residual, const T* weight, float eps, int64_t num_rows,
                  int64_t size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows >= 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        const T* source = x + row * size;
        if (residual != nullptr) {
            const T* other = residual + row * size;
            T* sum = total + row * size;
#pragma omp simd
            for (int64_t i = 0; i < size; ++i) store(sum[i], load(source[i]) + load(other[i]));
            source = sum;
        }
        float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; ++i) squares += load(source[i]) * load(source[i]);
        float scale = 1.0f / std::sqrt(squares / float(size) + eps);
        T* target = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) store(target[i], load(source[i]) * scale * load(weight[i]));
    }
}

template <typename T>
void silu_mul(T* out, const T* gate_up, int64_t num_rows, int64_t size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows >= 8)
    for (int64_t row = 0; row < num_rows; ++row) {
        const T* gate = gate_up + row * 2 * size;
        const T* up = gate + size;
        T* target = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            float g = load(gate[i]);
            store(target[i], g / (1.0f + exp_fast(-g)) * load(up[i]));
        }
    }
}

template <typename T>
inline void rotate(T* target, const T* source, const float* cos_sin, int64_t head_dim) {
    int64_t half = head_dim / 2;
    const float* cos = cos_sin;
    const float* sin = cos_sin + half;
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        float low = load(source[i]), high = load(source[i + half]);
        store(target[i], low * cos[i] - high * sin[i]);
        store(target[i + half], high * cos[i] + low * sin[i]);
    }
}

struct Heads { int64_t num_heads, num_kv_heads, head_dim; };

template <typename T>
void rope_write(T* q_out, T* k_cache, T* v_cache, const T* q, const T* k, const T* v, const int64_t* token_strides,
                const float* cos_sin, const int64_t* positions, const int64_t* slots, int64_t num_tokens, Heads heads,
                int num_threads) {
    int64_t dim = heads.head_dim;
#pragma omp parallel for num_threads(num_threads) if (num_tokens >= 16)
    for (int64_t token = 0; token < num_tokens; ++token) {
        const float* angles = cos_sin + positions[token] * dim;
        for (int64_t head = 0; head < heads.num_heads; ++head)
            rotate(q_out + (token * heads.num_heads + head) * dim, q + token * token_strides[0] + head * dim, angles,
                   dim);
        if (slots[token] < 0) continue;
        for (int64_t head = 0; head < heads.num_kv_heads; ++head) {
            int64_t at = (slots[token] * heads.num_kv_heads + head) * dim;
            rotate(k_cache + at, k + token * token_strides[1] + head * dim, angles, dim);
            std::memcpy(v_cache + at, v + token * token_strides[2] + head * dim, dim * sizeof(T));
        }
    }
}

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

// KV heads [first_head, last_head) of one sequence; blocks are read once each, in the order of the table.
template <typename T, int DIM, int GROUP>
void attend_sequence(T* out, const T* q, Cache<T> cache, Heads heads, const int32_t* blocks, int64_t seq_len,
                     float scale, int64_t first_head, int64_t last_head, std::vector<float>& scratch) {
    Group<T, DIM, GROUP> parts{heads.head_dim, heads.num_heads / heads.num_kv_heads};
    const int64_t dim = parts.dim(), group = parts.group(), per_head = group * dim;
    const int64_t num_heads = last_head - first_head, token_stride = heads.num_kv_heads * dim;
    scratch.assign(num_heads * (2 * per_head + group * seq_len), 0.0f);
    float *queries = scratch.data(), *sums = queries + num_heads * per_head, *scores = sums + num_heads * per_head;
    for (int64_t i = 0; i < num_heads * per_head; ++i) queries[i] = load(q[first_head * per_head + i]) * scale;
    auto each_block = [&](auto visit) {
        for (int64_t first = 0; first < seq_len; first += cache.block_size) {
            int64_t count = std::min(cache.block_size, seq_len - first);
            int64_t at = int64_t(blocks[first / cache.block_size]) * cache.block_size * token_stride;
            for (int64_t head = 0; head < num_heads; ++head)
                visit(head, at + (first_head + head) * dim, scores + head * group * seq_len + first, count);
        }
    };
    each_block([&](int64_t head, int64_t at, float* s, int64_t count) {
        parts.score(s, seq_len, queries + head * per_head, cache.k + at, token_stride, count);
    });
    for (int64_t row = 0; row < num_heads * group; ++row) {
        float inverse = 1.0f / soften(scores + row * seq_len, seq_len);
        for (int64_t i = 0; i < seq_len; ++i) scores[row * seq_len + i] *= inverse;
    }
    each_block([&](int64_t head, int64_t at, float* s, int64_t count) {
        parts.accumulate(sums + head * per_head, s, seq_len, cache.v + at, token_stride, count);
    });
    for (int64_t i = 0; i < num_heads * per_head; ++i) store(out[first_head * per_head + i], sums[i]);
}

template <typename T>
using Attend = void (*)(T*, const T*, Cache<T>, Heads, const int32_t*, int64_t, float, int64_t, int64_t,
                        std::vector<float>&);

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

// Sequences with one new token; others are left alone. A thread takes whole sequences where there are enough of them,
// so that it reads blocks from end to end, else single KV heads.
template <typename T>
void decode_attention(T* out, const T* q, Cache<T> cache, Heads heads, const int32_t* cu_seqlens, const int32_t* seq_lens,
                      const int32_t* block_tables, int64_t table_stride, int64_t num_seqs, float scale,
                      int num_threads) {
    const int64_t heads_per_task = num_seqs >= 4 * num_threads || num_threads == 1 ? heads.num_kv_heads : 1;
    const int64_t tasks_per_seq = heads.num_kv_heads / heads_per_task;
    Attend<T> attend = attend_for<T>(heads);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        static thread_local std::vector<float> scratch;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < num_seqs * tasks_per_seq; ++task) {
            int64_t seq = task / tasks_per_seq, head = task % tasks_per_seq * heads_per_task;
            int64_t token = cu_seqlens[seq];
            if (cu_seqlens[seq + 1] - token != 1) continue;
            int64_t row = token * heads.num_heads * heads.head_dim;
            attend(out + row, q + row, cache, heads, block_tables + seq * table_stride, seq_lens[seq], scale, head,
                   head + heads_per_task, scratch);
        }
    }
}

// lowbias32 of a token id under a row's key, see common/sampling/noise.py; the upper 23 bits.
inline uint32_t noise_bits(uint32_t token_id, uint32_t key_low, uint32_t key_high) {
    uint32_t bits = token_id * 0x9E3779B1u + key_low;
    bits = (bits ^ (bits >> 16)) * 0x7FEB352Du;
    bits ^= key_high;
    bits = (bits ^ (bits >> 15)) * 0x846CA68Bu;
    return (bits ^ (bits >> 16)) >> 9;
}

constexpr float kStep = 1.0f / 8388608.0f;  // 2^-23
constexpr int64_t kChunk = 256;

inline void best_of(const float* logits, int64_t size, float* best, int64_t* best_idx) {
    float top = -std::numeric_limits<float>::infinity();
    int64_t top_chunk = 0;
    int32_t num_nan = 0;
    for (int64_t first = 0; first < size; first += kChunk) {
        int64_t count = std::min(kChunk, size - first);
        float chunk = -std::numeric_limits<float>::infinity();
        int32_t nans = 0;
#pragma omp simd reduction(max : chunk) reduction(+ : nans)
        for (int64_t i = 0; i < count; ++i) {
            chunk = std::max(chunk, logits[first + i]);
            nans += logits[first + i] != logits[first + i];
        }
        if (chunk > top) top = chunk, top_chunk = first;
        num_nan += nans;
    }
    *best_idx = top_chunk;
    for (int64_t i = top_chunk; i < std::min(size, top_chunk + kChunk); ++i)
        if (logits[i] == top) {
            *best_idx = i;
            break;
        }
    *best = num_nan ? std::numeric_limits<float>::quiet_NaN() : top;
}

}  // namespace

#define DISPATCH(call)           \
    if (is_bfloat16) {           \
        using T = bfloat16;      \
        call;                    \
    } else {                     \
        using T = float;         \
        call;                    \
    }

extern "C" {

void pdserve_add_rms_norm(void* out, void* total, const void* x, const void* residual, const void* weight, float eps,
                          int64_t num_rows, int64_t size, int is_bfloat16, int num_threads) {
    DISPATCH(add_rms_norm((T*)out, (T*)total, (const T*)x, (const T*)residual, (const T*)weight, eps, num_rows, size,
                          num_threads))
}

void pdserve_silu_mul(void* out, const void* gate_up, int64_t num_rows, int64_t size, int is_bfloat16,
                      int num_threads) {
    DISPATCH(silu_mul((T*)out, (const T*)gate_up, num_rows, size, num_threads))
}

void pdserve_rope_write(void* q_out, void* k_cache, void* v_cache, const void* q, const void* k, const void* v,
                        int64_t q_stride, int64_t k_stride, int64_t v_stride, const float* cos_sin,
                        const int64_t* positions, const int64_t* slots, int64_t num_tokens, int64_t num_heads,
                        int64_t num_kv_heads, int64_t head_dim, int is_bfloat16, int num_threads) {
    const int64_t strides[] = {q_stride, k_stride, v_stride};
    DISPATCH(rope_write((T*)q_out, (T*)k_cache, (T*)v_cache, (const T*)q, (const T*)k, (const T*)v, strides, cos_sin,
                        positions, slots, num_tokens, Heads{num_heads, num_kv_heads, head_dim}, num_threads))
}

void pdserve_decode_attention(void* out, const void* q, const void* k_cache, const void* v_cache, int64_t block_size,
                              int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, const int32_t* cu_seqlens,
                              const int32_t* seq_lens, const int32_t* block_tables, int64_t table_stride,
                              int64_t num_seqs, float scale, int is_bfloat16, int num_threads) {
    DISPATCH(decode_attention((T*)out, (const T*)q, Cache<T>{(const T*)k_cache, (const T*)v_cache, block_size},
                              Heads{num_heads, num_kv_heads, head_dim}, cu_seqlens, seq_lens, block_tables,
                              table_stride, num_seqs, scale, num_threads))
}

// Per row the greatest logit (NaN where any is) and the first token that has it.
void pdserve_best(const float* logits, int64_t row_stride, int64_t num_rows, int64_t size, float* best,
                  int64_t* best_idx, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows > 1)
    for (int64_t row = 0; row < num_rows; ++row)
        best_of(logits + row * row_stride, size, best + row, best_idx + row);
}

// Per row the tokens that can win logits / temperature + noise, ascending, into candidates[row * size ...].
// `floors` are what a known token of the row reaches; noise(u) <= -log(1 - u) because -log(u) >= 1 - u, so a token below
// floor - noise cannot win. The comparison has a margin wider than every rounding in it.
void pdserve_draw_candidates(int32_t* candidates, int32_t* counts, const float* logits, int64_t row_stride,
                             const int64_t* rows, const float* temperatures, const float* floors,
                             const uint32_t* keys_low, const uint32_t* keys_high, int64_t num_rows, int64_t size,
                             int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows > 1)
    for (int64_t i = 0; i < num_rows; ++i) {
        const float* row = logits + rows[i] * row_stride;
        const float inverse = 1.0f / temperatures[i];
        const float floor = floors[i] - 1e-3f - 4e-6f * std::fabs(floors[i]);
        const uint32_t low = keys_low[i], high = keys_high[i];
        int32_t* target = candidates + i * size;
        int32_t count = 0;
        for (int64_t first = 0; first < size; first += kChunk) {
            int64_t length = std::min(kChunk, size - first);
            uint8_t may_win[kChunk];
            int32_t num_winners = 0;
#pragma omp simd reduction(+ : num_winners)
            for (int64_t t = 0; t < length; ++t) {
                float distance = row[first + t] * inverse - floor;
                uint32_t bits = noise_bits(uint32_t(first + t), low, high);
                float rest = (8388607.5f - float(int32_t(bits))) * kStep;  // 1 - u, at least 2^-24
                bool wins = rest <= exp_fast(distance) * 1.0001f;
                may_win[t] = wins;
                num_winners += wins;
            }
            if (num_winners == 0) continue;
            for (int64_t t = 0; t < length; ++t)
                if (may_win[t]) target[count++] = int32_t(first + t);
        }
        counts[i] = count;
    }
}
}
