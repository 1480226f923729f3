package exportablecache;

import java.nio.ByteBuffer;
import java.nio.CharBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Collections;
import java.util.Map;
import java.util.function.LongPredicate;
import java.util.function.Predicate;

/**
 * A program and its position, over the C interface (exportable_cache.h), for Java and Kotlin on a desktop or on Android.
 *
 * <p>Use it in one thread at a time, except for {@link #cancel}. Close it, because the garbage collector does not free its cache.
 */
public final class Session implements AutoCloseable {
  static {
    System.loadLibrary("exportable_cache_jni");
  }

  /** The allowed next tokens, called once before each choice. */
  public interface AllowedTokens {
    /**
     * Set bit {@code token % 32} of {@code mask[token / 32]}, initially 0, for each token that is allowed after {@code tokens}, the
     * tokens chosen so far without the prompt. Return false if the response is complete, which ends it.
     */
    boolean allow(long[] tokens, int[] mask);
  }

  /** Log probabilities under the model, before temperature and other settings; called before each token. */
  public interface LogProbs {
    /** Take the token's log probability, and the most probable tokens, in order, with theirs. */
    void take(double logProb, long[] tokens, double[] logProbs);
  }

  /** Options of a generation; the default is greedy, with as many tokens as fit. */
  public static final class Options {
    public long maxNewTokens = 0; // 0: as many as fit
    public double temperature = 0; // 0: always the most probable token
    public long topK = 0; // 0: no limit
    public double topP = 1; // 1: no limit
    public double minP = 0; // 0: no limit; otherwise only tokens at least minP times as probable as the most probable one
    public boolean fromCheckpoint = false; // sample as its generation_config says; the four above, if set, replace its values
    public Long seed = null; // seed of the draws
    public long[] stopTokens = {};
    public String[] stopStrings = {};
    public double repetitionPenalty = 0; // 0: the checkpoint's; above 1, tokens of the text become less likely
    public double presencePenalty = 0; // subtracted from the logits of tokens that were generated
    public double frequencyPenalty = 0; // subtracted from a token's logit each time that it was generated
    public long[] countedTokens = {}; // tokens of earlier calls that count as generated
    public Map<Long, Double> logitBias = Collections.emptyMap(); // numbers that are added to the logits of tokens
    public long promptLookup = 0; // most tokens proposed per step from the text itself; 0: none
    public long draftTokens = 0; // most tokens proposed per step by the bundle's draft head, at most 15; 0: none
    public long cachedTokens = 0; // the prompt's first tokens that are cached: only the rest is fed; 0: it follows the cached tokens
    public boolean shiftWhenFull = false; // drop old tokens when the cache is full, and continue
    public long protectedTokens = 4; // first tokens that shifts keep
    public LogProbs onLogProbs = null; // null: not called
    public long alternatives = 0; // most probable tokens that onLogProbs gets
    public AllowedTokens allowedTokens = null; // null: all are allowed
  }

  /** The reason why a generation ended, in the order of ec_stop. */
  public enum Stop { END_TOKEN, STOP_STRING, MAX_NEW_TOKENS, CACHE_FULL, CALLBACK, CANCELLED, WHOLE }

  /** Result of a generation; times in seconds. */
  public static final class Statistics {
    public final long promptTokens, generatedTokens, proposedTokens, acceptedTokens;
    public final double timeToFirstToken, decodeSeconds;
    public final Stop stop;

    Statistics(long[] counts, double[] seconds) {
      promptTokens = counts[0];
      generatedTokens = counts[1];
      proposedTokens = counts[2];
      acceptedTokens = counts[3];
      stop = Stop.values()[(int) counts[4]];
      timeToFirstToken = seconds[0];
      decodeSeconds = seconds[1];
    }
  }

  /** A call that was refused or failed; the message has the value, the limit and the remedy. */
  public static final class Failure extends RuntimeException {
    private static final long serialVersionUID = 1;

    /** An ec_status: 1 an invalid argument, 2 a full cache, 3 the bundle, 4 the runtime. */
    public final int status;

    Failure(int status, byte[] message) {
      super(text(message));
      this.status = status;
    }
  }

  private static final int INPUT = 1; // of ec_status
  private static final int TOKENS = 0, TEXT = 1, QUESTION = 2, MESSAGES = 3; // what a generation continues

  private long handle;

  /**
   * Set the compute threads of all sessions in this process, 1 to 512; the default is the number of cores. Call it before the first
   * session is opened: another number is refused while one is open. No other call may run at the same time.
   */
  public static void setThreads(long threads) {
    threads(threads);
  }

  /** Open the bundle in a folder, at position 0. */
  public Session(String folder) {
    handle = open(bytes("folder", folder));
  }

  @Override
  public synchronized void close() {
    close(handle);
    handle = 0;
  }

  /** Feed tokens after the cached ones; returns the logits of the last one. */
  public float[] prefill(long[] tokens) {
    return prefill(open(), given("tokens", tokens));
  }

  /** Encode an encoder-decoder's input; the decoder starts again. */
  public void encodeInput(long[] tokens) {
    encodeTokens(open(), given("tokens", tokens));
  }

  /** Encode the values that a speech model's processor makes; the decoder starts again. */
  public void encodeInput(float[] values) {
    encodeValues(open(), given("values", values));
  }

  /**
   * Add an image, video or audio for the next prompt: one tensor of the model's processor by its name, such as "pixel_values", last
   * dimension innermost. The prompt has the placeholder token once per embedding; {@link #reset} drops what was added.
   */
  public void addInput(String name, float[] values, long... shape) {
    checkShape(given("values", values).length, given("shape", shape));
    addFloats(open(), bytes("name", name), values, shape);
  }

  /** Add a grid or a mask for the next prompt, see {@link #addInput(String, float[], long...)}. */
  public void addInput(String name, long[] values, long... shape) {
    checkShape(given("values", values).length, given("shape", shape));
    addIntegers(open(), bytes("name", name), values, shape);
  }

  /** Roll back the newest tokens. */
  public void rewind(long tokens) {
    rewind(open(), tokens);
  }

  /** Drop {@code count} tokens from position {@code first} on; later tokens move to lower positions. */
  public void shift(long count, long first) {
    shift(open(), count, first);
  }

  /** Start again at position 0. */
  public void reset() {
    reset(open());
  }

  /** The number of cached tokens. */
  public long length() {
    return lengths(open())[0];
  }

  /** The limit of cached tokens; -1 for none. */
  public long maxLength() {
    return lengths(open())[1];
  }

  /** Generate tokens after a prompt; the callback returns false to end it. */
  public Statistics generate(long[] prompt, Options options, LongPredicate onToken) {
    given("onToken", onToken);
    return generated(TOKENS, given("prompt", prompt), null, null, options, onToken);
  }

  /** Generate text after a text; the callback returns false to end it. */
  public Statistics generateText(String prompt, Options options, Predicate<String> onText) {
    return answer(TEXT, bytes("prompt", prompt), null, options, onText);
  }

  /** Respond to a question with the model's chat template; {@code system} comes before the first question, or is "". */
  public Statistics chat(String question, String system, Options options, Predicate<String> onText) {
    return answer(QUESTION, bytes("question", question), bytes("system", system), options, onText);
  }

  /** Respond to a request with the whole conversation, see {@link #render}; cached tokens of an earlier one are not fed again. */
  public Statistics chatMessages(String request, Options options, Predicate<String> onText) {
    return answer(MESSAGES, bytes("request", request), null, options, onText);
  }

  /**
   * The model's chat template over a request in JSON: the messages, or an object with "messages", "tools" and other variables of the
   * template. Needs a library built with -DEC_TEMPLATES=ON.
   */
  public String render(String request) {
    return text(render(open(), bytes("request", request)));
  }

  /**
   * Load a LoRA adapter that {@code exportable-cache adapter} wrote into a slot of the program, under a name. A name that is known
   * gets the new adapter. Needs a bundle exported with {@code --lora-slots}.
   */
  public void loadAdapter(String path, String name) {
    loadAdapter(open(), bytes("path", path), bytes("name", name));
  }

  /** Free the slot of an adapter; if it is in use, the model continues without one. */
  public void unloadAdapter(String name) {
    unloadAdapter(open(), bytes("name", name));
  }

  /**
   * Run the next steps with an adapter, or with the model itself for null. Cached tokens keep the values that they were computed with,
   * so {@link #reset} before a text with another adapter.
   */
  public void useAdapter(String name) {
    useAdapter(open(), name == null ? null : bytes("name", name));
  }

  private Statistics answer(int call, byte[] text, byte[] system, Options options, Predicate<String> onText) {
    given("onText", onText);
    Predicate<byte[]> onBytes = piece -> onText.test(text(piece));
    return generated(call, null, text, system, options, onBytes);
  }

  private Statistics generated(int call, long[] tokens, byte[] text, byte[] system, Options options, Object callback) {
    byte[][] stops = stops(options);
    given("options.countedTokens", options.countedTokens);
    long[] biased = new long[given("options.logitBias", options.logitBias).size()];
    double[] biases = new double[biased.length], seconds = new double[2];
    int count = 0;
    for (Map.Entry<Long, Double> bias : options.logitBias.entrySet()) {
      biased[count] = given("a token of options.logitBias", bias.getKey());
      biases[count++] = given("a number of options.logitBias", bias.getValue());
    }
    long[] counts = generate(open(), call, tokens, text, system, options, stops, biased, biases, callback, seconds);
    return new Statistics(counts, seconds);
  }

  /** Token ids of a text. */
  public long[] tokenize(String text, boolean starts) {
    return tokenize(open(), bytes("text", text), starts);
  }

  /** End the running generation, from any thread. */
  public void cancel() {
    cancel(open());
  }

  /** Save the session's state to a file. */
  public void saveState(String path) {
    state(open(), bytes("path", path), true);
  }

  /** Load a saved state of this bundle. */
  public void loadState(String path) {
    state(open(), bytes("path", path), false);
  }

  private long open() {
    if (handle == 0) throw new IllegalStateException("the session is closed");
    return handle;
  }

  // Java's own encoding of strings for C differs from UTF-8.
  private static byte[] bytes(String name, String text) {
    int zero = given(name, text).indexOf('\0');
    if (zero >= 0) throw refused(name + " must have no zero character, where C takes it to end, got one at " + zero + "; leave it out");
    try {
      ByteBuffer encoded = StandardCharsets.UTF_8.newEncoder().encode(CharBuffer.wrap(text));
      return Arrays.copyOf(encoded.array(), encoded.limit() + 1);
    } catch (CharacterCodingException error) {
      throw refused(name + " must be whole characters, got half of a surrogate pair; leave it out");
    }
  }

  private static <Value> Value given(String name, Value value) {
    if (value == null) throw refused(name + " must be given, got null");
    return value;
  }

  // C reads as many values as the sizes multiply to.
  private static void checkShape(int values, long[] shape) {
    long count = 1;
    for (long size : shape) count = size > 0 && count > 0 && count <= values / size ? count * size : -1;
    if (count != values) throw refused("shape must have the sizes of the " + values + " values, got " + Arrays.toString(shape) + "; pass each size");
  }

  private static Failure refused(String message) {
    return new Failure(INPUT, message.getBytes(StandardCharsets.UTF_8));
  }

  private static String text(byte[] bytes) {
    return new String(bytes, StandardCharsets.UTF_8);
  }

  private static byte[][] stops(Options options) {
    given("options.stopTokens", given("options", options).stopTokens);
    byte[][] found = new byte[given("options.stopStrings", options.stopStrings).length][];
    for (int index = 0; index < found.length; ++index) found[index] = bytes("options.stopStrings[" + index + "]", options.stopStrings[index]);
    return found;
  }

  private static native void threads(long count);

  private static native long open(byte[] folder);

  private static native void close(long session);

  private static native float[] prefill(long session, long[] tokens);

  private static native void rewind(long session, long tokens);

  private static native void shift(long session, long count, long first);

  private static native void reset(long session);

  private static native long[] lengths(long session);

  private static native long[] generate(
      long session, int call, long[] tokens, byte[] text, byte[] system, Options options, byte[][] stops, long[] biased,
      double[] biases, Object callback, double[] seconds);

  private static native byte[] render(long session, byte[] request);

  private static native void loadAdapter(long session, byte[] path, byte[] name);

  private static native void unloadAdapter(long session, byte[] name);

  private static native void useAdapter(long session, byte[] name);

  private static native void addFloats(long session, byte[] name, float[] values, long[] shape);

  private static native void addIntegers(long session, byte[] name, long[] values, long[] shape);

  private static native void encodeTokens(long session, long[] tokens);

  private static native void encodeValues(long session, float[] values);

  private static native long[] tokenize(long session, byte[] text, boolean starts);

  private static native void cancel(long session);

  private static native void state(long session, byte[] path, boolean save);
}
