/**
 * The Java client of Headrace, a gRPC server for large language models. Begin with {@link
 * io.github.headrace.HeadraceClient#builder}.
 *
 * <p>Generated messages and stubs are in {@code io.github.headrace.v1}; nothing of them is needed
 * to use the client.
 */
package io.github.headrace;
