package io.github.headrace;

/**
 * A function that the model may call.
 *
 * @param name 1 to 64 letters, digits, "_", "-" and "."
 * @param description what it does, for the model; may be empty
 * @param parametersJsonSchema JSON Schema of its arguments, that of an object; empty: it has none
 * @param strict whether arguments can only be such as the schema allows
 */
public record Tool(String name, String description, String parametersJsonSchema, boolean strict) {

    /**
     * A strict tool.
     *
     * @param name its name
     * @param description what it does
     * @param parametersJsonSchema JSON Schema of its arguments
     */
    public Tool(String name, String description, String parametersJsonSchema) {
        this(name, description, parametersJsonSchema, true);
    }

    io.github.headrace.v1.Tool message(String field) {
        return io.github.headrace.v1.Tool.newBuilder()
                .setName(Wire.utf8(field + ".name", name))
                .setDescription(Wire.utf8(field + ".description", description))
                .setParametersJsonSchema(Wire.utf8(field + ".parameters_json_schema", parametersJsonSchema))
                .setStrict(strict)
                .build();
    }
}
