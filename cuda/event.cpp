/* event.cpp - points in a device's stream, and the time between two of them. */
#include "device.cuh"

struct nd_event {
    cudaEvent_t event;
    bool recorded;
};

nd_status cuda_event_new(int device, nd_event **out) {
    *out = nullptr;
    ND_TRY(cuda_enter(device));
    nd_event *event = new nd_event{nullptr, false};
    cudaError_t error = cudaEventCreate(&event->event);
    if (error != cudaSuccess) {
        delete event;
        return cuda_error("event", "cudaEventCreate", error);
    }
    *out = event;
    return ND_OK;
}

nd_status cuda_event_record(int device, nd_event *event, bool side) {
    ND_TRY(cuda_enter(device));
    CUDA_TRY("event", cudaEventRecord(event->event, cuda_stream(device, side)));
    event->recorded = true;
    return ND_OK;
}

nd_status cuda_event_wait(int device, nd_event *event, bool side) {
    ND_TRY(cuda_enter(device));
    if (!event->recorded) {
        return nd_error(ND_EVALUE, "event: wait: the event must have been recorded");
    }
    CUDA_TRY("event", cudaStreamWaitEvent(cuda_stream(device, side), event->event, 0));
    return ND_OK;
}

nd_status cuda_event_query(int device, nd_event *event, bool *done) {
    ND_TRY(cuda_enter(device));
    if (!event->recorded) {
        return nd_error(ND_EVALUE, "event: done: the event must have been recorded");
    }
    cudaError_t error = cudaEventQuery(event->event);
    *done = error == cudaSuccess;
    if (error == cudaErrorNotReady) {
        cudaGetLastError(); /* an answer, which the next call must not take for a failure */
        return ND_OK;
    }
    CUDA_TRY("event", error);
    return ND_OK;
}

nd_status cuda_event_elapsed(int device, nd_event *from, nd_event *to, double *milliseconds) {
    ND_TRY(cuda_enter(device));
    if (!from->recorded || !to->recorded) {
        return nd_error(ND_EVALUE, "event: elapsed: both events must have been recorded");
    }
    float ms = 0.0f;
    CUDA_TRY("event", cudaEventSynchronize(from->event));
    CUDA_TRY("event", cudaEventSynchronize(to->event));
    CUDA_TRY("event", cudaEventElapsedTime(&ms, from->event, to->event));
    *milliseconds = (double)ms;
    return ND_OK;
}

nd_status cuda_event_free(int device, nd_event *event) {
    if (!event) {
        return ND_OK;
    }
    nd_status status = ND_OK;
    if (!cuda_faulted()) {
        status = cuda_enter(device);
        if (status == ND_OK) {
            cudaError_t error = cudaEventDestroy(event->event);
            if (error != cudaSuccess && error != cudaErrorCudartUnloading) {
                status = cuda_error("event", "cudaEventDestroy", error);
            }
        }
    }
    delete event;
    return status;
}
