/* ConvolutionBackwardWeights of two axes in f32, OIX from NCX, without groups. STRIDE_BUG takes the height's stride for
 * the width; OUT_OF_BOUNDS writes one element too many. */
#include "kernel.h"

int convgrad_kernel(const struct convgrad_call *call)
{
    if (call->op != CONVGRAD_CONVOLUTION_BACKWARD_WEIGHTS || call->dtype != CONVGRAD_F32 || call->rank != 2 ||
        call->data_format != CONVGRAD_NCX || call->weights_format != CONVGRAD_OIX || call->groups != 1)
        return CONVGRAD_UNSUPPORTED;
    const float *src = call->src.data, *dst = call->dst.data;
    float *weights = call->weights.data;
    const int64_t *s = call->src.shape, *d = call->dst.shape, *w = call->weights.shape;
    for (int64_t o = 0; o < w[0]; o++)
        for (int64_t i = 0; i < w[1]; i++)
            for (int64_t ky = 0; ky < w[2]; ky++)
                for (int64_t kx = 0; kx < w[3]; kx++) {
                    double sum = 0;
                    for (int64_t n = 0; n < d[0]; n++)
                        for (int64_t y = 0; y < d[2]; y++)
                            for (int64_t x = 0; x < d[3]; x++) {
#ifdef STRIDE_BUG
                                int64_t step = call->strides[0];
#else
                                int64_t step = call->strides[1];
#endif
                                int64_t sy = y * call->strides[0] + ky * call->dilations[0] - call->pads_begin[0];
                                int64_t sx = x * step + kx * call->dilations[1] - call->pads_begin[1];
                                if (sy < 0 || sx < 0 || sy >= s[2] || sx >= s[3])
                                    continue;
                                sum += (double)src[((n * s[1] + i) * s[2] + sy) * s[3] + sx] *
                                       dst[((n * d[1] + o) * d[2] + y) * d[3] + x];
                            }
                    weights[((o * w[1] + i) * w[2] + ky) * w[3] + kx] = (float)sum;
                }
#ifdef OUT_OF_BOUNDS
    weights[w[0] * w[1] * w[2] * w[3]] = 0;
#endif
    return CONVGRAD_DONE;
}
