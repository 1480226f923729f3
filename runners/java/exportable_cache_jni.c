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

/* A copy of an array's elements, to be freed; null with an exception if there is no memory or no array. */
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
  jobject object;
  jmethodID test;
} Callback;

static int on_token(int64_t token, void* user) {
  const Callback* callback = user;
  JNIEnv* env = callback->env;
  const jboolean goes_on = (*env)->CallBooleanMethod(env, callback->object, callback->test, (jlong)token);
  return !(*env)->ExceptionCheck(env) && goes_on;
}

static int on_text(const char* piece, size_t size, void* user) {
  const Callback* callback = user;
  JNIEnv* env = callback->env;
  jbyteArray text = (*env)->NewByteArray(env, (jsize)size);
  if (text == NULL) return 0;
  (*env)->SetByteArrayRegion(env, text, 0, (jsize)size, (const jbyte*)piece);
  const jboolean goes_on = (*env)->CallBooleanMethod(env, callback->object, callback->test, text);
  /* A generation may have more pieces than Java allows local references. */
  (*env)->DeleteLocalRef(env, text);
  return !(*env)->ExceptionCheck(env) && goes_on;
}

static int on_allowed(const int64_t* tokens, size_t count, uint32_t* mask, size_t words, void* user) {
  const Callback* callback = user;
  JNIEnv* env = callback->env;
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

static jlong long_field(JNIEnv* env, jobject object, const char* name) {
  jclass kind = (*env)->GetObjectClass(env, object);
  return (*env)->GetLongField(env, object, (*env)->GetFieldID(env, kind, name, "J"));
}

static double double_field(JNIEnv* env, jobject object, const char* name) {
  jclass kind = (*env)->GetObjectClass(env, object);
  return (*env)->GetDoubleField(env, object, (*env)->GetFieldID(env, kind, name, "D"));
}

static void read_seed(JNIEnv* env, jobject object, ec_options* options) {
  jclass kind = (*env)->GetObjectClass(env, object);
  jobject seed = (*env)->GetObjectField(env, object, (*env)->GetFieldID(env, kind, "seed", "Ljava/lang/Long;"));
  if (seed == NULL) return;
  jclass number = (*env)->GetObjectClass(env, seed);
  options->seed = (uint64_t)(*env)->CallLongMethod(env, seed, (*env)->GetMethodID(env, number, "longValue", "()J"));
  options->has_seed = !(*env)->ExceptionCheck(env);
}

/* Prompt, tokens and texts that are freed together. */
typedef struct Arguments {
  ec_options options;
  Callback allowed;
  int64_t* tokens;
  char* text;
  char* system; /* for a chat; NULL for a text to continue */
  int64_t* stop_tokens;
  char** stops;
  size_t stop_count;
} Arguments;

static void free_arguments(Arguments* arguments) {
  for (size_t index = 0; arguments->stops != NULL && index < arguments->stop_count; ++index) free(arguments->stops[index]);
  free(arguments->stops);
  free(arguments->stop_tokens);
  free(arguments->tokens);
  free(arguments->text);
  free(arguments->system);
}

/* True if everything was allocated; otherwise an exception is pending. */
static int read_arguments(JNIEnv* env, Arguments* arguments, jlongArray tokens, jbyteArray text, jobject options, jobjectArray stops) {
  ec_options* known = &arguments->options;
  ec_options_init(known, sizeof *known);
  known->max_new_tokens = long_field(env, options, "maxNewTokens");
  known->temperature = double_field(env, options, "temperature");
  known->top_k = long_field(env, options, "topK");
  known->top_p = double_field(env, options, "topP");
  known->prompt_lookup = long_field(env, options, "promptLookup");
  read_seed(env, options, known);
  jclass kind = (*env)->GetObjectClass(env, options);
  known->from_checkpoint = (*env)->GetBooleanField(env, options, (*env)->GetFieldID(env, kind, "fromCheckpoint", "Z"));
  jclass allows = (*env)->FindClass(env, "exportablecache/Session$AllowedTokens");
  if (allows == NULL) return 0;
  jfieldID allowed = (*env)->GetFieldID(env, kind, "allowedTokens", "Lexportablecache/Session$AllowedTokens;");
  arguments->allowed = (Callback){env, (*env)->GetObjectField(env, options, allowed), (*env)->GetMethodID(env, allows, "allow", "([J[I)Z")};
  known->allowed_user = &arguments->allowed;
  if (arguments->allowed.object != NULL) known->allowed_tokens = on_allowed;
  jlongArray stop_tokens = (*env)->GetObjectField(env, options, (*env)->GetFieldID(env, kind, "stopTokens", "[J"));
  arguments->stop_tokens = copy_of(env, stop_tokens, sizeof(jlong));
  if (arguments->stop_tokens == NULL) return 0;
  known->stop_tokens = arguments->stop_tokens;
  known->stop_token_count = (size_t)(*env)->GetArrayLength(env, stop_tokens);
  arguments->stop_count = (size_t)(*env)->GetArrayLength(env, stops);
  arguments->stops = calloc(arguments->stop_count + 1, sizeof(char*));
  for (size_t index = 0; arguments->stops != NULL && index < arguments->stop_count; ++index) {
    arguments->stops[index] = copy_of(env, (jarray)(*env)->GetObjectArrayElement(env, stops, (jsize)index), 1);
    if (arguments->stops[index] == NULL) return 0;
  }
  known->stop_strings = (const char* const*)arguments->stops;
  known->stop_string_count = arguments->stops == NULL ? 0 : arguments->stop_count;
  if (tokens != NULL) return (arguments->tokens = copy_of(env, tokens, sizeof(jlong))) != NULL;
  return (arguments->text = copy_of(env, text, 1)) != NULL;
}

JNIEXPORT jlongArray JNICALL Java_exportablecache_Session_generate(JNIEnv* env, jclass kind, jlong session, jlongArray tokens,
                                                                   jbyteArray text, jbyteArray system, jobject options,
                                                                   jobjectArray stops, jobject callback, jdoubleArray seconds) {
  (void)kind;
  Arguments arguments = {0};
  int whole = read_arguments(env, &arguments, tokens, text, options, stops);
  if (whole && system != NULL) whole = (arguments.system = copy_of(env, system, 1)) != NULL;
  if (!whole) {
    free_arguments(&arguments);
    return NULL;
  }
  ec_statistics statistics = {0};
  statistics.size = sizeof statistics;
  jclass taker = (*env)->FindClass(env, tokens != NULL ? "java/util/function/LongPredicate" : "java/util/function/Predicate");
  Callback user = {env, callback, (*env)->GetMethodID(env, taker, "test", tokens != NULL ? "(J)Z" : "(Ljava/lang/Object;)Z")};
  ec_session* used = session_of(session);
  ec_status status;
  if (tokens != NULL) {
    const size_t count = (size_t)(*env)->GetArrayLength(env, tokens);
    status = ec_generate(used, arguments.tokens, count, &arguments.options, on_token, &user, &statistics);
  } else if (arguments.system != NULL) {
    status = ec_chat(used, arguments.text, arguments.system, &arguments.options, on_text, &user, &statistics);
  } else {
    status = ec_generate_text(used, arguments.text, &arguments.options, on_text, &user, &statistics);
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
