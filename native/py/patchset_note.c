// An ELF note with the hash of the patch set, compiled into every library and the extension. patchset.py reads it from
// each file before the dynamic linker loads any of them.

struct note {
    unsigned int name_size;
    unsigned int text_size;
    unsigned int type;
    char name[12];
    char text[16];
};

__attribute__((used, section(".note.moegraph"), aligned(4)))
static const struct note patchset = { sizeof("moegraph"), sizeof(patchset.text), 1, "moegraph", MOEGRAPH_PATCHSET };
