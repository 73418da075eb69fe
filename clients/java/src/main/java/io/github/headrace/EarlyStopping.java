package io.github.headrace;

/** When a beam search ends that has found as many whole outputs as it is wide. */
public enum EarlyStopping {
    /** When no unfinished output would be better than the whole ones if it ended at its length. */
    HEURISTIC,
    /** At once. */
    FULL,
    /** When no unfinished output can become better than the whole ones. */
    NEVER;

    io.github.headrace.v1.EarlyStopping wire() {
        return switch (this) {
            case HEURISTIC -> io.github.headrace.v1.EarlyStopping.EARLY_STOPPING_HEURISTIC;
            case FULL -> io.github.headrace.v1.EarlyStopping.EARLY_STOPPING_FULL;
            case NEVER -> io.github.headrace.v1.EarlyStopping.EARLY_STOPPING_NEVER;
        };
    }
}
