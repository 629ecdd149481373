// The element-wise work between a layer's products, each in one pass. Sums are in float32; a bfloat16 result is rounded
// once, at the end.

#pragma once

#include "numbers.h"

struct Heads { int64_t num_heads, num_kv_heads, head_dim; };

template <typename T>
inline void rms_norm_row(T* out, const T* x, const T* weight, float eps, int64_t size) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; ++i) squares += load(x[i]) * load(x[i]);
    float scale = 1.0f / std::sqrt(squares / float(size) + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) store(out[i], load(x[i]) * scale * load(weight[i]));
}

template <typename T>
inline void add_row(T* total, const T* x, const T* residual, int64_t size) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) store(total[i], load(x[i]) + load(residual[i]));
}

template <typename T>
void add_rms_norm(T* out, T* total, const T* x, const T* residual, const T* weight, float eps, int64_t num_rows,
                  int64_t size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows >= 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        const T* source = x + row * size;
        if (residual != nullptr) {
            add_row(total + row * size, source, residual + row * size, size);
            source = total + row * size;
        }
        rms_norm_row(out + row * size, source, weight, eps, size);
    }
}

template <typename T>
inline void silu_mul_row(T* out, const T* gate_up, int64_t size) {
    const T* up = gate_up + size;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
        float g = load(gate_up[i]);
        store(out[i], g / (1.0f + exp_fast(-g)) * load(up[i]));
    }
}

template <typename T>
void silu_mul(T* out, const T* gate_up, int64_t num_rows, int64_t size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows >= 8)
    for (int64_t row = 0; row < num_rows; ++row) silu_mul_row(out + row * size, gate_up + row * 2 * size, size);
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

// Where k and v of a step's tokens go, and by which angles q and k turn.
struct Placement {
    const float* cos_sin;  // [max_position, head_dim]
    const int64_t *positions, *slots;
};

// q, k and v of one token, the heads of each contiguous; a slot of -1 is not written.
template <typename T>
inline void rope_write_token(T* q_out, T* k_cache, T* v_cache, const T* q, const T* k, const T* v, Placement placement,
                             int64_t token, Heads heads) {
    int64_t dim = heads.head_dim, slot = placement.slots[token];
    const float* angles = placement.cos_sin + placement.positions[token] * dim;
    for (int64_t head = 0; head < heads.num_heads; ++head) rotate(q_out + head * dim, q + head * dim, angles, dim);
    if (slot < 0) return;
    for (int64_t head = 0; head < heads.num_kv_heads; ++head) {
        int64_t at = (slot * heads.num_kv_heads + head) * dim;
        rotate(k_cache + at, k + head * dim, angles, dim);
        std::memcpy(v_cache + at, v + head * dim, dim * sizeof(T));
    }
}

template <typename T>
void rope_write(T* q_out, T* k_cache, T* v_cache, const T* q, const T* k, const T* v, const int64_t* token_strides,
                Placement placement, int64_t num_tokens, Heads heads, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_tokens >= 16)
    for (int64_t token = 0; token < num_tokens; ++token)
        rope_write_token(q_out + token * heads.num_heads * heads.head_dim, k_cache, v_cache,
                         q + token * token_strides[0], k + token * token_strides[1], v + token * token_strides[2],
                         placement, token, heads);
}
