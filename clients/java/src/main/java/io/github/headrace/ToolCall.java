package io.github.headrace;

/**
 * A function that the model called.
 *
 * @param id names the call in the message that brings its result
 * @param name the function
 * @param arguments JSON text of its arguments
 * @param valid whether the call names one of the request's tools, and its arguments are one JSON
 *     object
 */
public record ToolCall(String id, String name, String arguments, boolean valid) {}
