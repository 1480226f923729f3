package exportablecache;

import java.nio.ByteBuffer;
import java.nio.CharBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
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

  /** Options of a generation; the default is greedy, with as many tokens as fit. */
  public static final class Options {
    public long maxNewTokens = 0; // 0: as many as fit
    public double temperature = 0; // 0: always the most probable token
    public long topK = 0; // 0: no limit
    public double topP = 1; // 1: no limit
    public boolean fromCheckpoint = false; // sample as its generation_config says; the three above, if set, replace its values
    public Long seed = null; // seed of the draws
    public long[] stopTokens = {};
    public String[] stopStrings = {};
    public long promptLookup = 0; // most tokens proposed per step from the text itself; 0: none
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

  /** Roll back the newest tokens. */
  public void rewind(long tokens) {
    rewind(open(), tokens);
  }

  /** Start again at position 0. */
  public void reset() {
    rewind(open(), length());
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
    double[] seconds = new double[2];
    byte[][] stops = stops(options);
    given("onToken", onToken);
    return new Statistics(generate(open(), given("prompt", prompt), null, null, options, stops, onToken, seconds), seconds);
  }

  /** Generate text after a text; the callback returns false to end it. */
  public Statistics generateText(String prompt, Options options, Predicate<String> onText) {
    return answer(bytes("prompt", prompt), null, options, onText);
  }

  /** Respond to a question with the model's chat template; {@code system} comes before the first question, or is "". */
  public Statistics chat(String question, String system, Options options, Predicate<String> onText) {
    return answer(bytes("question", question), bytes("system", system), options, onText);
  }

  private Statistics answer(byte[] text, byte[] system, Options options, Predicate<String> onText) {
    double[] seconds = new double[2];
    given("onText", onText);
    Predicate<byte[]> onBytes = piece -> onText.test(text(piece));
    return new Statistics(generate(open(), null, text, system, options, stops(options), onBytes, seconds), seconds);
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

  private static native long[] lengths(long session);

  private static native long[] generate(
      long session, long[] tokens, byte[] text, byte[] system, Options options, byte[][] stops, Object callback,
      double[] seconds);

  private static native void encodeTokens(long session, long[] tokens);

  private static native void encodeValues(long session, float[] values);

  private static native long[] tokenize(long session, byte[] text, boolean starts);

  private static native void cancel(long session);

  private static native void state(long session, byte[] path, boolean save);
}
