// The Python module _quota: csrc/cpu/quota.h on a folder that stands for the system's files.
#include "cpu/quota.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

PYBIND11_MODULE(_quota, module) { module.def("processors_of_quota", &pass_ext::processors_of_quota); }
