// The norms whose products bound the error of a dot product; docs/dsa_exactness.md derives them.
//
// The product of two elements d of D passes through at most w_d roundings of half a unit, those of the score included,
//
//     w_d = first + (D - d) per_element + (D / 16 - floor(d / 16)) per_step
//
// and |x_d y_d| summed over w_d is at most norm(x) norm(y) with
//
//     norm(x)^2 = sum of w_d x_d^2 (+ low l_d^2 where x_d is scored as two parts, of which l_d is the lower one)
//
// As (D - d) x_d^2 sum to the same as the prefix sums of x_d^2 do, no element needs a weight of its own.
#pragma once

struct NormWeights {
    float first, per_element, per_step, low;
    float floor;  // added to each norm, for elements whose squares or whose parts are below the normal range

    // The weight of an element that `elements` are left from on, itself included, and `steps`.
    __device__ __forceinline__ float of(int elements, int steps) const {
        return __fmaf_rn(static_cast<float>(steps), per_step,
                         __fmaf_rn(static_cast<float>(elements), per_element, first));
    }

    // The norm from its squares, rounded up: the factor covers all roundings of the sum and of the root.
    __device__ __forceinline__ float norm(float squares) const {
        return __fmaf_rn(sqrtf(squares), 1.0f + 0x1p-10f, floor);
    }
};

// Sums over consecutive elements, in ascending order.
struct NormSums {
    float squares = 0.0f;
    float prefixes = 0.0f;  // of the squares up to each element
    float steps = 0.0f;     // of those up to the end of each step of 16
    float low = 0.0f;

    __device__ __forceinline__ void add(float x) {
        squares = __fmaf_rn(x, x, squares);
        prefixes = __fadd_rn(prefixes, squares);
    }

    __device__ __forceinline__ void add_low(float x) { low = __fmaf_rn(x, x, low); }

    __device__ __forceinline__ void end_step() { steps = __fadd_rn(steps, squares); }

    // The weighted squares, if so many elements follow these, and so many steps after the last one that was ended.
    __device__ __forceinline__ float weighted(const NormWeights& weights, int elements_after, int steps_after) const {
        const float each = weights.of(elements_after, steps_after);
        const float own = __fmaf_rn(prefixes, weights.per_element, __fmul_rn(steps, weights.per_step));
        return __fmaf_rn(squares, each, __fmaf_rn(low, weights.low, own));
    }
};
