/* The interface of a kernel in a shared library that `convgrad check` can load.
 *
 *     cc -shared -fPIC -I "$(python -c 'import convgrad; print(*convgrad.__path__)')" -o mine.so mine.c
 *     convgrad check ./mine.so --local
 *
 * The library exports one function, `convgrad_kernel`, or another name that is given as `./mine.so:name`.
 */
#ifndef CONVGRAD_KERNEL_H
#define CONVGRAD_KERNEL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum convgrad_op {
    CONVGRAD_CONVOLUTION_BACKWARD_WEIGHTS = 0,
    CONVGRAD_CONV_TRANSPOSE_BACKWARD_WEIGHTS = 1,
    CONVGRAD_CONVOLUTION_BACKWARD_DATA = 2,
    CONVGRAD_CONV_TRANSPOSE_BACKWARD_DATA = 3,
    CONVGRAD_CONVOLUTION = 4,
    CONVGRAD_CONV_TRANSPOSE = 5,
    CONVGRAD_BIAS_ADD = 6,
    CONVGRAD_BIAS_ADD_BACKWARD = 7
};

enum convgrad_dtype { CONVGRAD_F32 = 0, CONVGRAD_F16 = 1, CONVGRAD_BF16 = 2, CONVGRAD_F64 = 3 };
enum convgrad_data_format { CONVGRAD_NCX = 0, CONVGRAD_NXC = 1 };
enum convgrad_weights_format { CONVGRAD_OIX = 0, CONVGRAD_XIO = 1, CONVGRAD_IOX = 2, CONVGRAD_XOI = 3 };

/* What the function returns. Any other value is an error. */
enum convgrad_status { CONVGRAD_DONE = 0, CONVGRAD_UNSUPPORTED = 1 };

/* A dense tensor in C order, aligned to its elements and no more. */
struct convgrad_tensor {
    void *data; /* NULL if the operation does not have this tensor */
    int32_t ndim;
    int32_t unused;
    int64_t shape[5];
};

/* One call. `src`, `weights`, `bias` and `dst` are also their gradients: ConvolutionBackwardWeights reads `src` and
 * `dst`, which is diff_dst, and writes `weights`. The inputs must not be changed; every element of the result must be
 * written. Arrays of one number for each spatial axis have `rank` valid entries. */
struct convgrad_call {
    int64_t size; /* sizeof(struct convgrad_call); later versions may be longer */
    int32_t op;
    int32_t dtype; /* of all tensors */
    int32_t rank;  /* spatial axes, 1 to 3 */
    int32_t data_format;
    int32_t weights_format;
    int32_t unused;
    int64_t groups; /* divide I of the weights of Convolution, O of those of ConvTranspose */
    int64_t strides[3];
    int64_t dilations[3];
    int64_t pads_begin[3];
    int64_t pads_end[3];
    int64_t output_padding[3];
    struct convgrad_tensor src;
    struct convgrad_tensor weights;
    struct convgrad_tensor bias;
    struct convgrad_tensor dst;
};

int convgrad_kernel(const struct convgrad_call *call);

#ifdef __cplusplus
}
#endif

#endif
