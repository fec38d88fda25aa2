/* A program without Python that uses an artifact: describe it, then ask whether it takes some tensors. */
#include <stdio.h>
#include <string.h>

#include "plain.h"

static int ask(int64_t m, int64_t n, int64_t k, int64_t k_of_w, int bits) {
  int64_t x_shape[] = {m, k}, w_shape[] = {n, k_of_w}, y_shape[] = {m, n};
  DLDevice device = {kDLCUDA, 0};
  DLDataType bf16 = {kDLBfloat, 16, 1}, other = {kDLFloat, (uint8_t)bits, 1};
  DLTensor x = {(void*)0x10000000, device, 2, bits == 16 ? bf16 : other, x_shape, NULL, 0};
  DLTensor w = {(void*)0x20000000, device, 2, bf16, w_shape, NULL, 0};
  DLTensor y = {(void*)0x30000000, device, 2, bf16, y_shape, NULL, 0};
  DLTensor* args[] = {&x, &w, &y};
  int status = plain_check(args, 3);
  printf("%d %s\n", status, coda_last_error());
  return status;
}

int main(void) {
  int good = strstr(coda_describe(), "\"name\": \"plain\"") != NULL;
  good &= ask(4096, 256, 512, 512, 16) == CODA_OK;
  good &= ask(1, 256, 512, 512, 16) == CODA_OK;
  good &= ask(0, 256, 512, 512, 16) == CODA_OK;
  good &= ask(4096, 256, 512, 640, 16) == CODA_REFUSED; /* K differs */
  good &= ask(4096, 256, 510, 510, 16) == CODA_REFUSED; /* rows not 16-byte aligned */
  good &= ask(4096, 256, 512, 512, 32) == CODA_REFUSED; /* f32 */
  good &= plain_check(NULL, 0) == CODA_REFUSED;
  printf("%d %s\n", CODA_REFUSED, coda_last_error());
  return good ? 0 : 1;
}
