package io.github.headrace;

import io.github.headrace.v1.AdminServiceGrpc;
import io.github.headrace.v1.DrainRequest;
import io.github.headrace.v1.GetMemoryPlanRequest;
import io.github.headrace.v1.ListRepositoryRequest;
import io.github.headrace.v1.LoadModelRequest;
import io.github.headrace.v1.SetTraceDetailRequest;
import io.github.headrace.v1.UnloadModelRequest;
import java.time.Duration;
import java.util.List;
import java.util.Optional;

/** Every call of the admin service as a value; see {@link Calls}. */
final class AdminCalls {
    private AdminCalls() {}

    /** Takes as long as a model takes to load. */
    static UnaryCall<?, ?, LoadedModel> loadModel(String model, long memoryBytes) {
        if (memoryBytes < 0) {
            throw Failure.invalid("memory_bytes", "must not be negative (given: " + memoryBytes + ")");
        }
        LoadModelRequest request = LoadModelRequest.newBuilder()
                .setModel(Wire.utf8("model", model))
                .setMemoryBytes(memoryBytes)
                .build();
        return new UnaryCall<>(AdminServiceGrpc.getLoadModelMethod(), request, LoadedModel::from, true);
    }

    /** Takes as long as open generations take, within the grace time; {@code grace} may be null. */
    static UnaryCall<?, ?, Void> unloadModel(String model, Duration grace) {
        UnloadModelRequest.Builder request = UnloadModelRequest.newBuilder().setModel(Wire.utf8("model", model));
        if (grace != null) {
            request.setGrace(Wire.duration(grace));
        }
        return new UnaryCall<>(AdminServiceGrpc.getUnloadModelMethod(), request.build(), empty -> null, true);
    }

    static UnaryCall<?, ?, List<RepositoryModel>> listRepository() {
        return UnaryCall.quick(
                AdminServiceGrpc.getListRepositoryMethod(),
                ListRepositoryRequest.getDefaultInstance(),
                response -> response.getModelsList().stream()
                        .map(RepositoryModel::from)
                        .toList());
    }

    static UnaryCall<?, ?, DrainStatus> drain(boolean resume) {
        DrainRequest request = DrainRequest.newBuilder().setResume(resume).build();
        return UnaryCall.quick(AdminServiceGrpc.getDrainMethod(), request, DrainStatus::from);
    }

    static UnaryCall<?, ?, Void> setTraceDetail(TraceDetail detail) {
        SetTraceDetailRequest request =
                SetTraceDetailRequest.newBuilder().setDetail(detail.wire()).build();
        return UnaryCall.quick(AdminServiceGrpc.getSetTraceDetailMethod(), request, empty -> null);
    }

    static UnaryCall<?, ?, Optional<MemoryPlan>> memoryPlan(String model) {
        return UnaryCall.quick(
                AdminServiceGrpc.getGetMemoryPlanMethod(),
                GetMemoryPlanRequest.newBuilder()
                        .setModel(Wire.utf8("model", model))
                        .build(),
                response -> response.hasPlan() ? Optional.of(MemoryPlan.from(response.getPlan())) : Optional.empty());
    }
}
