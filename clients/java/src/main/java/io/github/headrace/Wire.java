package io.github.headrace;

import java.time.Duration;

/**
 * Refuses values that the wire format cannot carry, with the field's path. Ranges are the server's
 * to check.
 */
final class Wire {
    private Wire() {}

    /** A number that the wire has as unsigned. */
    static int unsigned(String field, int value) {
        if (value < 0) {
            throw Failure.invalid(field, "must not be negative (given: " + value + ")");
        }
        return value;
    }

    /**
     * Text; a surrogate without its other half is no UTF-8 and would be sent as a question mark.
     */
    static String utf8(String field, String text) {
        for (int i = 0; i < text.length(); i++) {
            char unit = text.charAt(i);
            boolean paired = i + 1 < text.length() && Character.isSurrogatePair(unit, text.charAt(i + 1));
            if (paired) {
                i++;
            } else if (Character.isSurrogate(unit)) {
                throw Failure.invalid(field, "is no UTF-8: half a character at position " + i);
            }
        }
        return text;
    }

    static com.google.protobuf.Duration duration(Duration time) {
        return com.google.protobuf.Duration.newBuilder()
                .setSeconds(time.getSeconds())
                .setNanos(time.getNano())
                .build();
    }
}
