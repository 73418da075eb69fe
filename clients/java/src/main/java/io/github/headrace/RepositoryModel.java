package io.github.headrace;

/**
 * A model of the server's repository folder.
 *
 * @param name name of its folder
 * @param state where it is in its life
 * @param reason why it failed, where it did; else empty
 * @param memoryBytes memory it may take; 0: not limited, or not loaded
 */
public record RepositoryModel(String name, State state, String reason, long memoryBytes) {

    /** Where a model of the repository is in its life. */
    public enum State {
        /** A state that is newer than this client. */
        UNKNOWN,
        /** In the folder, no backend. */
        UNLOADED,
        /** Its backend starts. */
        LOADING,
        /** It serves. */
        READY,
        /** It takes no new generations and will end. */
        UNLOADING,
        /** Its backend did not start, or cannot be kept running. */
        FAILED;

        static State from(io.github.headrace.v1.ModelState state) {
            return switch (state) {
                case MODEL_STATE_UNLOADED -> UNLOADED;
                case MODEL_STATE_LOADING -> LOADING;
                case MODEL_STATE_READY -> READY;
                case MODEL_STATE_UNLOADING -> UNLOADING;
                case MODEL_STATE_FAILED -> FAILED;
                default -> UNKNOWN;
            };
        }
    }

    static RepositoryModel from(io.github.headrace.v1.RepositoryModel model) {
        return new RepositoryModel(
                model.getName(), State.from(model.getState()), model.getReason(), model.getMemoryBytes());
    }
}
