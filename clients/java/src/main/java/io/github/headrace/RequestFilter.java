package io.github.headrace;

/**
 * Which of the caller's requests to list, and in pages of which size.
 *
 * @param state only requests in this state; null: all
 * @param model only requests of this model; null: of all models
 * @param pageSize most rows of a page, 1 to 1,000; null: the server's default, 100
 */
public record RequestFilter(RequestState state, String model, Integer pageSize) {
    /** All requests. */
    public static final RequestFilter ALL = new RequestFilter(null, null, null);

    /**
     * This filter for requests of one state.
     *
     * @param wanted the state
     * @return another filter
     */
    public RequestFilter state(RequestState wanted) {
        return new RequestFilter(wanted, model, pageSize);
    }

    /**
     * This filter for requests of one model.
     *
     * @param wanted the model's name
     * @return another filter
     */
    public RequestFilter model(String wanted) {
        return new RequestFilter(state, wanted, pageSize);
    }

    /**
     * This filter with pages of another size.
     *
     * @param rows most rows of a page, 1 to 1,000
     * @return another filter
     */
    public RequestFilter pageSize(int rows) {
        return new RequestFilter(state, model, rows);
    }
}
