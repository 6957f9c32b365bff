#include "moegraph.h"

#ifndef MOEGRAPH_PATCHSET
#error "MOEGRAPH_PATCHSET is not defined: moegraph's CMakeLists.txt does it"
#endif

const char * moegraph_patchset(void) {
    return MOEGRAPH_PATCHSET;
}
