# SPDX-License-Identifier: Apache-2.0
# Triton looks here for `compiler` and `driver` (entry-point group triton.backends, name "cpu").
