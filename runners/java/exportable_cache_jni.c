/* The native methods of exportablecache.Session, over the C interface. */
#include <jni.h>
#include <stdlib.h>
#include <string.h>

#include <exportable_cache.h>

/* Throw Session.Failure with the library's message; a pending exception of Java stays. */
static void throw_failure(JNIEnv* env, ec_status status) {
  if ((*env)->ExceptionCheck(env)) return;
  const char* message = ec_error();
  const jsize size = (jsize)strlen(message);
  jclass kind = (*env)->FindClass(env, "exportablecache/Session$Failure");
  jbyteArray text = kind == NULL ? NULL : (*env)->NewByteArray(env, size);
  if (text == NULL) return;
  (*env)->SetByteArrayRegion(env, text, 0, size, (const jbyte*)message);
  jmethodID make = (*env)->GetMethodID(env, kind, "<init>", "(I[B)V");
  jobject failure = make == NULL ? NULL : (*env)->NewObject(env, kind, make, (jint)status, text);
  if (failure != NULL) (*env)->Throw(env, (jthrowable)failure);
}

static ec_session* session_of(jlong handle) { return (ec_session*)(intptr_t)handle; }

/* A copy of an array of bytes or longs, to be freed; null with an exception if there is no memory or no array. */
static void* copy_of(JNIEnv* env, jarray array, size_t element) {
  if (array == NULL) {
    jclass kind = (*env)->FindClass(env, "java/lang/NullPointerException");
    if (kind != NULL) (*env)->ThrowNew(env, kind, "an argument is null");
    return NULL;
  }
  const jsize count = (*env)->GetArrayLength(env, array);
  void* copy = malloc(count > 0 ? (size_t)count * element : 1);
  if (copy == NULL) {
    jclass kind = (*env)->FindClass(env, "java/lang/OutOfMemoryError");
    if (kind != NULL) (*env)->ThrowNew(env, kind, "no memory for a copy of an argument");
  } else if (element == sizeof(jlong)) {
    (*env)->GetLongArrayRegion(env, (jlongArray)array, 0, count, (jlong*)copy);
  } else {
    (*env)->GetByteArrayRegion(env, (jbyteArray)array, 0, count, (jbyte*)copy);
  }
  return copy;
}

JNIEXPORT void JNICALL Java_exportablecache_Session_threads(JNIEnv* env, jclass kind, jlong count) {
  (void)kind;
  const ec_status status = ec_set_threads(count);
  if (status != EC_OK) throw_failure(env, status);
}

JNIEXPORT jlong JNICALL Java_exportablecache_Session_open(JNIEnv* env, jclass kind, jbyteArray folder) {
  (void)kind;
  char* path = copy_of(env, folder, 1);
  if (path == NULL) return 0;
  ec_session* session = NULL;
  const ec_status status = ec_open(path, &session);
  free(path);
  if (status != EC_OK) throw_failure(env, status);
  return (jlong)(intptr_t)session;
}

JNIEXPORT void JNICALL Java_exportablecache_Session_close(JNIEnv* env, jclass kind, jlong session) {
  (void)env, (void)kind;
  ec_close(session_of(session));
}

JNIEXPORT jfloatArray JNICALL Java_exportablecache_Session_prefill(JNIEnv* env, jclass kind, jlong session, jlongArray tokens) {
  (void)kind;
  int64_t* ids = copy_of(env, tokens, sizeof(jlong));
  if (ids == NULL) return NULL;
  const float* logits = NULL;
  size_t vocab = 0;
  const ec_status status = ec_prefill(session_of(session), ids, (size_t)(*env)->GetArrayLength(env, tokens), &logits, &vocab);
  free(ids);
  if (status != EC_OK) {
    throw_failure(env, status);
    return NULL;
  }
  jfloatArray found = (*env)->NewFloatArray(env, (jsize)vocab);
  if (found != NULL) (*env)->SetFloatArrayRegion(env, found, 0, (jsize)vocab, logits);
  return found;
}

JNIEXPORT void JNICALL Java_exportablecache_Session_encodeTokens(JNIEnv* env, jclass kind, jlong session, jlongArray tokens) {
  (void)kind;
  int64_t* ids = copy_of(env, tokens, sizeof(jlong));
  if (ids == NULL) return;
  const ec_status status = ec_encode_tokens(session_of(session), ids, (size_t)(*env)->GetArrayLength(env, tokens));
  free(ids);
  if (status != EC_OK) throw_failure(env, status);
}

JNIEXPORT void JNICALL Java_exportablecache_Session_encodeValues(JNIEnv* env, jclass kind, jlong session, jfloatArray values) {
  (void)kind;
  const jsize count = (*env)->GetArrayLength(env, values);
  jfloat* numbers = (*env)->GetFloatArrayElements(env, values, NULL);
  if (numbers == NULL) return;
  const ec_status status = ec_encode_values(session_of(session), numbers, (size_t)count);
  (*env)->ReleaseFloatArrayElements(env, values, numbers, JNI_ABORT);
  if (status != EC_OK) throw_failure(env, status);
}

JNIEXPORT void JNICALL Java_exportablecache_Session_rewind(JNIEnv* env, jclass kind, jlong session, jlong tokens) {
  (void)kind;
  const ec_status status = ec_rewind(session_of(session), tokens);
  if (status != EC_OK) throw_failure(env, status);
}

JNIEXPORT void JNICALL Java_exportablecache_Session_shift(JNIEnv* env, jclass kind, jlong session, jlong count, jlong first) {
  (void)kind;
  const ec_status status = ec_shift(session_of(session), count, first);
  if (status != EC_OK) throw_failure(env, status);
}

JNIEXPORT void JNICALL Java_exportablecache_Session_reset(JNIEnv* env, jclass kind, jlong session) {
  (void)kind;
  const ec_status status = ec_reset(session_of(session));
  if (status != EC_OK) throw_failure(env, status);
}

/* Add a tensor, whose sizes multiply to the number of its values. */
static void add_input(JNIEnv* env, jlong session, jbyteArray name, const void* values, int dtype, jlongArray shape) {
  char* known = copy_of(env, name, 1);
  int64_t* sizes = known == NULL ? NULL : copy_of(env, shape, sizeof(jlong));
  if (sizes != NULL) {
    const size_t dims = (size_t)(*env)->GetArrayLength(env, shape);
    const ec_status status = ec_add_input(session_of(session), known, values, dtype, sizes, dims);
    if (status != EC_OK) throw_failure(env, status);
  }
  free(sizes);
  free(known);
}

JNIEXPORT void JNICALL Java_exportablecache_Session_addFloats(JNIEnv* env, jclass kind, jlong session, jbyteArray name,
                                                              jfloatArray values, jlongArray shape) {
  (void)kind;
  jfloat* numbers = (*env)->GetFloatArrayElements(env, values, NULL);
  if (numbers == NULL) return;
  add_input(env, session, name, numbers, EC_FLOAT32, shape);
  (*env)->ReleaseFloatArrayElements(env, values, numbers, JNI_ABORT);
}

JNIEXPORT void JNICALL Java_exportablecache_Session_addIntegers(JNIEnv* env, jclass kind, jlong session, jbyteArray name,
                                                                jlongArray values, jlongArray shape) {
  (void)kind;
  int64_t* numbers = copy_of(env, values, sizeof(jlong));
  if (numbers == NULL) return;
  add_input(env, session, name, numbers, EC_INT64, shape);
  free(numbers);
}

JNIEXPORT jlongArray JNICALL Java_exportablecache_Session_lengths(JNIEnv* env, jclass kind, jlong session) {
  (void)kind;
  int64_t lengths[2] = {0, 0};
  const ec_status status = ec_length(session_of(session), &lengths[0], &lengths[1]);
  if (status != EC_OK) throw_failure(env, status);
  jlongArray found = (*env)->NewLongArray(env, 2);
  if (found != NULL) (*env)->SetLongArrayRegion(env, found, 0, 2, (const jlong*)lengths);
  return found;
}

typedef struct Callback {
  JNIEnv* env;
  ec_session* session;
  jobject object;
  jmethodID test;
} Callback;

static int on_token(int64_t token, void* user) {
  const Callback* callback = user;
  JNIEnv* env = callback->env;
  /* An exception of another callback, after which no Java method may be called. */
  if ((*env)->ExceptionCheck(env)) return 0;
  const jboolean goes_on = (*env)->CallBooleanMethod(env, callback->object, callback->test, (jlong)token);
  return !(*env)->ExceptionCheck(env) && goes_on;
}

static jbyteArray bytes_of(JNIEnv* env, const char* piece, size_t size) {
  jbyteArray text = (*env)->NewByteArray(env, (jsize)size);
  if (text != NULL) (*env)->SetByteArrayRegion(env, text, 0, (jsize)size, (const jbyte*)piece);
  return text;
}

static int on_text(const char* piece, size_t size, void* user) {
  const Callback* callback = user;
  JNIEnv* env = callback->env;
  if ((*env)->ExceptionCheck(env)) return 0;
  jbyteArray text = bytes_of(env, piece, size);
  if (text == NULL) return 0;
  const jboolean goes_on = (*env)->CallBooleanMethod(env, callback->object, callback->test, text);
  /* A generation may have more pieces than Java allows local references. */
  (*env)->DeleteLocalRef(env, text);
  return !(*env)->ExceptionCheck(env) && goes_on;
}

static int on_allowed(const int64_t* tokens, size_t count, uint32_t* mask, size_t words, void* user) {
  const Callback* callback = user;
  JNIEnv* env = callback->env;
  if ((*env)->ExceptionCheck(env)) return -1;
  jlongArray given = (*env)->NewLongArray(env, (jsize)count);
  jintArray bits = given == NULL ? NULL : (*env)->NewIntArray(env, (jsize)words);
  if (bits == NULL) return -1;
  (*env)->SetLongArrayRegion(env, given, 0, (jsize)count, (const jlong*)tokens);
  const jboolean goes_on = (*env)->CallBooleanMethod(env, callback->object, callback->test, given, bits);
  if ((*env)->ExceptionCheck(env)) return -1;
  (*env)->GetIntArrayRegion(env, bits, 0, (jsize)words, (jint*)mask);
  (*env)->DeleteLocalRef(env, given);
  (*env)->DeleteLocalRef(env, bits);
  return goes_on;
}

static void on_logprobs(double logprob, const int64_t* tokens, const double* logprobs, size_t count, void* user) {
  const Callback* callback = user;
  JNIEnv* env = callback->env;
  if ((*env)->ExceptionCheck(env)) return;
  jlongArray most = (*env)->NewLongArray(env, (jsize)count);
  jdoubleArray theirs = most == NULL ? NULL : (*env)->NewDoubleArray(env, (jsize)count);
  if (theirs != NULL) {
    (*env)->SetLongArrayRegion(env, most, 0, (jsize)count, (const jlong*)tokens);
    (*env)->SetDoubleArrayRegion(env, theirs, 0, (jsize)count, logprobs);
    (*env)->CallVoidMethod(env, callback->object, callback->test, logprob, most, theirs);
  }
  (*env)->DeleteLocalRef(env, most);
  (*env)->DeleteLocalRef(env, theirs);
  if ((*env)->ExceptionCheck(env)) ec_cancel(callback->session);
}

/* An object whose fields are read, with its class once, because the number of local references is limited. */
typedef struct Fields {
  JNIEnv* env;
  jobject object;
  jclass kind;
} Fields;

static jfieldID field_of(const Fields* fields, const char* name, const char* type) {
  return (*fields->env)->GetFieldID(fields->env, fields->kind, name, type);
}

static jlong long_field(const Fields* fields, const char* name) {
  return (*fields->env)->GetLongField(fields->env, fields->object, field_of(fields, name, "J"));
}

static double double_field(const Fields* fields, const char* name) {
  return (*fields->env)->GetDoubleField(fields->env, fields->object, field_of(fields, name, "D"));
}

static int is_set(const Fields* fields, const char* name) {
  return (*fields->env)->GetBooleanField(fields->env, fields->object, field_of(fields, name, "Z"));
}

static jobject object_field(const Fields* fields, const char* name, const char* type) {
  return (*fields->env)->GetObjectField(fields->env, fields->object, field_of(fields, name, type));
}

/* A copy of a field of longs, to be freed, and their number; null with an exception if there is none. */
static int64_t* longs_field(const Fields* fields, const char* name, size_t* count) {
  JNIEnv* env = fields->env;
  jlongArray array = object_field(fields, name, "[J");
  int64_t* copy = copy_of(env, array, sizeof(jlong));
  *count = copy == NULL ? 0 : (size_t)(*env)->GetArrayLength(env, array);
  return copy;
}

static void read_seed(const Fields* fields, ec_options* options) {
  JNIEnv* env = fields->env;
  jobject seed = object_field(fields, "seed", "Ljava/lang/Long;");
  if (seed == NULL) return;
  jclass number = (*env)->GetObjectClass(env, seed);
  options->seed = (uint64_t)(*env)->CallLongMethod(env, seed, (*env)->GetMethodID(env, number, "longValue", "()J"));
  options->has_seed = !(*env)->ExceptionCheck(env);
}

/* Prompt, tokens and texts that are freed together. */
typedef struct Arguments {
  ec_options options;
  Callback allowed, log_probs;
  int64_t* tokens;
  char* text;
  char* system; /* NULL for none */
  int64_t* stop_tokens;
  int64_t* counted_tokens;
  int64_t* biased;
  double* biases;
  char** stops;
  size_t stop_count;
} Arguments;

static void free_arguments(Arguments* arguments) {
  for (size_t index = 0; arguments->stops != NULL && index < arguments->stop_count; ++index) free(arguments->stops[index]);
  free(arguments->stops);
  free(arguments->stop_tokens);
  free(arguments->counted_tokens);
  free(arguments->biased);
  free(arguments->biases);
  free(arguments->tokens);
  free(arguments->text);
  free(arguments->system);
}

static void read_numbers(const Fields* fields, ec_options* known) {
  known->max_new_tokens = long_field(fields, "maxNewTokens");
  known->temperature = double_field(fields, "temperature");
  known->top_k = long_field(fields, "topK");
  known->top_p = double_field(fields, "topP");
  known->min_p = double_field(fields, "minP");
  known->from_checkpoint = is_set(fields, "fromCheckpoint");
  known->repetition_penalty = double_field(fields, "repetitionPenalty");
  known->presence_penalty = double_field(fields, "presencePenalty");
  known->frequency_penalty = double_field(fields, "frequencyPenalty");
  known->prompt_lookup = long_field(fields, "promptLookup");
  known->draft_tokens = long_field(fields, "draftTokens");
  known->cached_tokens = long_field(fields, "cachedTokens");
  known->shift_when_full = is_set(fields, "shiftWhenFull");
  known->protected_tokens = long_field(fields, "protectedTokens");
  known->alternatives = long_field(fields, "alternatives");
  read_seed(fields, known);
}

/* False with an exception. */
static int read_callbacks(const Fields* fields, jlong session, Arguments* arguments) {
  JNIEnv* env = fields->env;
  jclass allows = (*env)->FindClass(env, "exportablecache/Session$AllowedTokens");
  jclass takes = allows == NULL ? NULL : (*env)->FindClass(env, "exportablecache/Session$LogProbs");
  if (takes == NULL) return 0;
  arguments->allowed = (Callback){env, session_of(session), object_field(fields, "allowedTokens", "Lexportablecache/Session$AllowedTokens;"),
                                  (*env)->GetMethodID(env, allows, "allow", "([J[I)Z")};
  arguments->log_probs = (Callback){env, session_of(session), object_field(fields, "onLogProbs", "Lexportablecache/Session$LogProbs;"),
                                    (*env)->GetMethodID(env, takes, "take", "(D[J[D)V")};
  ec_options* known = &arguments->options;
  known->allowed_user = &arguments->allowed;
  known->logprobs_user = &arguments->log_probs;
  if (arguments->allowed.object != NULL) known->allowed_tokens = on_allowed;
  if (arguments->log_probs.object != NULL) known->on_logprobs = on_logprobs;
  return 1;
}

/* False with an exception. */
static int read_stops(JNIEnv* env, jobjectArray stops, Arguments* arguments) {
  arguments->stop_count = (size_t)(*env)->GetArrayLength(env, stops);
  arguments->stops = calloc(arguments->stop_count + 1, sizeof(char*));
  for (size_t index = 0; arguments->stops != NULL && index < arguments->stop_count; ++index) {
    jarray stop = (*env)->GetObjectArrayElement(env, stops, (jsize)index);
    arguments->stops[index] = copy_of(env, stop, 1);
    if (arguments->stops[index] == NULL) return 0;
    (*env)->DeleteLocalRef(env, stop);
  }
  arguments->options.stop_strings = (const char* const*)arguments->stops;
  arguments->options.stop_string_count = arguments->stops == NULL ? 0 : arguments->stop_count;
  return 1;
}

/* False with an exception. */
static int read_biases(JNIEnv* env, jlongArray biased, jdoubleArray biases, Arguments* arguments) {
  const jsize count = (*env)->GetArrayLength(env, biased);
  arguments->biased = copy_of(env, biased, sizeof(jlong));
  arguments->biases = arguments->biased == NULL ? NULL : malloc(((size_t)count + 1) * sizeof(double));
  if (arguments->biases == NULL) return 0;
  (*env)->GetDoubleArrayRegion(env, biases, 0, count, arguments->biases);
  arguments->options.bias_tokens = arguments->biased;
  arguments->options.bias_values = arguments->biases;
  arguments->options.bias_count = (size_t)count;
  return 1;
}

/* True if everything was read; otherwise an exception is pending. */
static int read_options(JNIEnv* env, jlong session, Arguments* arguments, jobject options) {
  const Fields fields = {env, options, (*env)->GetObjectClass(env, options)};
  ec_options* known = &arguments->options;
  ec_options_init(known, sizeof *known);
  read_numbers(&fields, known);
  if ((*env)->ExceptionCheck(env) || !read_callbacks(&fields, session, arguments)) return 0;
  known->stop_tokens = arguments->stop_tokens = longs_field(&fields, "stopTokens", &known->stop_token_count);
  if (arguments->stop_tokens == NULL) return 0;
  known->counted_tokens = arguments->counted_tokens = longs_field(&fields, "countedTokens", &known->counted_token_count);
  return arguments->counted_tokens != NULL;
}

/* What a generation continues, as in Session.java. */
enum { TOKENS = 0, TEXT = 1, QUESTION = 2, MESSAGES = 3 };

JNIEXPORT jlongArray JNICALL Java_exportablecache_Session_generate(JNIEnv* env, jclass kind, jlong session, jint call, jlongArray tokens,
                                                                   jbyteArray text, jbyteArray system, jobject options,
                                                                   jobjectArray stops, jlongArray biased, jdoubleArray biases,
                                                                   jobject callback, jdoubleArray seconds) {
  (void)kind;
  Arguments arguments = {0};
  int whole = read_options(env, session, &arguments, options) && read_stops(env, stops, &arguments) &&
              read_biases(env, biased, biases, &arguments);
  if (whole && call == TOKENS) whole = (arguments.tokens = copy_of(env, tokens, sizeof(jlong))) != NULL;
  if (whole && call != TOKENS) whole = (arguments.text = copy_of(env, text, 1)) != NULL;
  if (whole && call == QUESTION) whole = (arguments.system = copy_of(env, system, 1)) != NULL;
  if (!whole) {
    free_arguments(&arguments);
    return NULL;
  }
  ec_statistics statistics = {0};
  statistics.size = sizeof statistics;
  jclass taker = (*env)->FindClass(env, call == TOKENS ? "java/util/function/LongPredicate" : "java/util/function/Predicate");
  jmethodID test = (*env)->GetMethodID(env, taker, "test", call == TOKENS ? "(J)Z" : "(Ljava/lang/Object;)Z");
  ec_session* used = session_of(session);
  Callback user = {env, used, callback, test};
  const ec_options* how = &arguments.options;
  ec_status status = EC_OK;
  switch (call) {
    case TOKENS: {
      const size_t count = (size_t)(*env)->GetArrayLength(env, tokens);
      status = ec_generate(used, arguments.tokens, count, how, on_token, &user, &statistics);
      break;
    }
    case QUESTION: status = ec_chat(used, arguments.text, arguments.system, how, on_text, &user, &statistics); break;
    case MESSAGES: status = ec_chat_messages(used, arguments.text, how, on_text, &user, &statistics); break;
    default: status = ec_generate_text(used, arguments.text, how, on_text, &user, &statistics);
  }
  free_arguments(&arguments);
  if (status != EC_OK) throw_failure(env, status);
  if ((*env)->ExceptionCheck(env)) return NULL;
  const jdouble times[2] = {statistics.time_to_first_token, statistics.decode_seconds};
  (*env)->SetDoubleArrayRegion(env, seconds, 0, 2, times);
  const jlong counts[5] = {statistics.prompt_tokens, statistics.generated_tokens, statistics.proposed_tokens,
                           statistics.accepted_tokens, statistics.stop};
  jlongArray found = (*env)->NewLongArray(env, 5);
  if (found != NULL) (*env)->SetLongArrayRegion(env, found, 0, 5, counts);
  return found;
}

JNIEXPORT jlongArray JNICALL Java_exportablecache_Session_tokenize(JNIEnv* env, jclass kind, jlong session, jbyteArray text,
                                                                   jboolean starts) {
  (void)kind;
  char* bytes = copy_of(env, text, 1);
  if (bytes == NULL) return NULL;
  size_t capacity = strlen(bytes) + 16, count = 0;
  int64_t* ids = malloc(capacity * sizeof(int64_t));
  ec_status status = ec_tokenize(session_of(session), bytes, starts, ids, ids == NULL ? 0 : capacity, &count);
  if (status == EC_OK && count > capacity) { /* a tokenizer that writes more tokens than there are bytes */
    free(ids);
    capacity = count;
    ids = malloc(capacity * sizeof(int64_t));
    status = ec_tokenize(session_of(session), bytes, starts, ids, ids == NULL ? 0 : capacity, &count);
  }
  jlongArray found = NULL;
  if (status != EC_OK) {
    throw_failure(env, status);
  } else if ((found = (*env)->NewLongArray(env, ids == NULL ? 0 : (jsize)count)) != NULL) {
    (*env)->SetLongArrayRegion(env, found, 0, (*env)->GetArrayLength(env, found), (const jlong*)ids);
  }
  free(ids);
  free(bytes);
  return found;
}

JNIEXPORT void JNICALL Java_exportablecache_Session_cancel(JNIEnv* env, jclass kind, jlong session) {
  (void)env, (void)kind;
  ec_cancel(session_of(session));
}

JNIEXPORT void JNICALL Java_exportablecache_Session_state(JNIEnv* env, jclass kind, jlong session, jbyteArray path, jboolean save) {
  (void)kind;
  char* bytes = copy_of(env, path, 1);
  if (bytes == NULL) return;
  const ec_status status = save ? ec_save_state(session_of(session), bytes) : ec_load_state(session_of(session), bytes);
  free(bytes);
  if (status != EC_OK) throw_failure(env, status);
}

typedef struct Rendered {
  JNIEnv* env;
  jbyteArray text;
} Rendered;

static int on_rendered(const char* piece, size_t size, void* user) {
  Rendered* rendered = user;
  rendered->text = bytes_of(rendered->env, piece, size);
  return 1;
}

JNIEXPORT jbyteArray JNICALL Java_exportablecache_Session_render(JNIEnv* env, jclass kind, jlong session, jbyteArray request) {
  (void)kind;
  char* text = copy_of(env, request, 1);
  if (text == NULL) return NULL;
  Rendered rendered = {env, NULL};
  const ec_status status = ec_render(session_of(session), text, on_rendered, &rendered);
  free(text);
  if (status != EC_OK) throw_failure(env, status);
  return rendered.text;
}

JNIEXPORT void JNICALL Java_exportablecache_Session_loadAdapter(JNIEnv* env, jclass kind, jlong session, jbyteArray path,
                                                                jbyteArray name) {
  (void)kind;
  char* file = copy_of(env, path, 1);
  char* known = file == NULL ? NULL : copy_of(env, name, 1);
  if (known != NULL) {
    const ec_status status = ec_load_adapter(session_of(session), file, known);
    if (status != EC_OK) throw_failure(env, status);
  }
  free(known);
  free(file);
}

JNIEXPORT void JNICALL Java_exportablecache_Session_unloadAdapter(JNIEnv* env, jclass kind, jlong session, jbyteArray name) {
  (void)kind;
  char* known = copy_of(env, name, 1);
  if (known == NULL) return;
  const ec_status status = ec_unload_adapter(session_of(session), known);
  free(known);
  if (status != EC_OK) throw_failure(env, status);
}

JNIEXPORT void JNICALL Java_exportablecache_Session_useAdapter(JNIEnv* env, jclass kind, jlong session, jbyteArray name) {
  (void)kind;
  char* known = name == NULL ? NULL : copy_of(env, name, 1);
  if (name != NULL && known == NULL) return;
  const ec_status status = ec_use_adapter(session_of(session), known);
  free(known);
  if (status != EC_OK) throw_failure(env, status);
}
