# SPDX-License-Identifier: Apache-2.0
from ehs.cli import main

if __name__ == "__main__":
    main()
