// The machine's own speed limit, measured. Includes nothing.
#pragma once

namespace onefold::python {

// float32 FLOP/s of the calling thread in multiply-adds, measured for about `seconds`.
double fma_probe(double seconds);

}  // namespace onefold::python
