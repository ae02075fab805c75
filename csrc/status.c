/* status.c - the message of a failed nd_status, one per thread.
 *
 * Linked into _C and into _cuda.so with hidden visibility, so each shared object has its own
 * message; a backend hands its own out through nd_backend.last_error.
 */
#include "needle.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MESSAGE_BYTES 1024

static _Thread_local char message[MESSAGE_BYTES] = "no error";

nd_status nd_error(nd_status status, const char *format, ...) {
    /* Formatted aside first: an argument may be the message itself, being wrapped. */
    char text[MESSAGE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    memcpy(message, text, sizeof text);
    return status;
}

const char *nd_last_error(void) { return message; }
