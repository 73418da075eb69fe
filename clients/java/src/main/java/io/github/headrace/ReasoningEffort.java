package io.github.headrace;

/** How much a model is to reason before it answers, in the words of its chat template. */
public enum ReasoningEffort {
    /** Little. */
    LOW,
    /** As much as is usual. */
    MEDIUM,
    /** Much. */
    HIGH;

    io.github.headrace.v1.ReasoningEffort wire() {
        return switch (this) {
            case LOW -> io.github.headrace.v1.ReasoningEffort.REASONING_EFFORT_LOW;
            case MEDIUM -> io.github.headrace.v1.ReasoningEffort.REASONING_EFFORT_MEDIUM;
            case HIGH -> io.github.headrace.v1.ReasoningEffort.REASONING_EFFORT_HIGH;
        };
    }
}
