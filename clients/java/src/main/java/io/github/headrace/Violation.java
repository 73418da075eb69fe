package io.github.headrace;

import java.io.Serializable;

/**
 * One rule that a request broke.
 *
 * @param field path of the field, for example {@code spec.sampling.top_p}
 * @param description the rule, its limit and the value that broke it
 */
public record Violation(String field, String description) implements Serializable {}
