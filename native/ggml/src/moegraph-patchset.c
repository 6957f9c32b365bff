#include "moegraph.h"

#ifndef MOEGRAPH_PATCHSET
#error "MOEGRAPH_PATCHSET is not defined: configure with -DMOEGRAPH_PATCHSET=<hash>"
#endif

const char * moegraph_patchset(void) {
    return MOEGRAPH_PATCHSET;
}
