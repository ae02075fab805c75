/* fake.h - faults and figures that a test injects into the fake libraries: NEEDLE_FAKE="count=2,ecc=3,wrong=gelu". */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The text after "name="; NULL where nothing was injected. Good until the next call. */
static inline const char *injected_text(const char *name) {
    static char text[64];
    const char *all = getenv("NEEDLE_FAKE");
    size_t length = strlen(name);
    for (const char *at = all; at != NULL && *at;
         at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        if (strncmp(at, name, length) == 0 && at[length] == '=') {
            snprintf(text, sizeof text, "%.*s", (int)strcspn(at + length + 1, ","),
                     at + length + 1);
            return text;
        }
    }
    return NULL;
}

static inline long long injected(const char *name, long long usual) {
    const char *text = injected_text(name);
    return text != NULL ? strtoll(text, NULL, 0) : usual;
}

static inline bool injected_is(const char *name, const char *value) {
    const char *text = injected_text(name);
    return text != NULL && strcmp(text, value) == 0;
}
