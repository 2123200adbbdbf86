//! Lua states and runs of scripts.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::{Arc, Weak},
    time::Duration,
};

use mlua::{
    Function, Lua, LuaOptions, MultiValue, StdLib, Table, Thread, ThreadStatus, UserDataFields as _, Value,
    VmState,
};
use skysail_http::head::Headers;
use skysail_policy::config::lua::LuaScript;
use tracing::info;

use super::{
    CHUNK, MAX_BODY, MAX_CALLS, MAX_MEMORY, MAX_STEPS,
    headers::{HeaderMap, Part, fields},
    stream::{Buffer, Handle, SharedStream, loggable},
};

/// Functions and names of the API that are written in Lua.
const PRELUDE: &str = include_str!("prelude.luau");
/// Time limit of an HTTP call for which the script gives none.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);

/// The functions that a script may define.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hook {
    Request,
    Response,
}

impl Hook {
    fn name(self) -> &'static str {
        match self {
            Self::Request => "envoy_on_request",
            Self::Response => "envoy_on_response",
        }
    }
}

/// The Lua states of a worker, by script.
#[derive(Default)]
pub(crate) struct States(RefCell<Vec<(Weak<LuaScript>, Rc<State>)>>);

/// The Lua state of a script.
pub(crate) struct State {
    lua: Lua,
    /// Number of steps that the current run has left.
    steps: Rc<Cell<u64>>,
    /// Marks values that the API yields, as opposed to values that the script yields.
    token: Table,
}

/// A run of a script.
pub(crate) struct Execution {
    state: Rc<State>,
    thread: Thread,
    stream: SharedStream,
    steps: u64,
    calls: u32,
}

/// Request of a script that waits.
pub(crate) enum ScriptRequest {
    /// The complete body. The script gets an object even for an empty body if the flag is set.
    Body(bool),
    /// The pieces of the body.
    Chunks,
    /// The trailers.
    Trailers,
    /// The response of a cluster.
    Call(Call),
    /// The end of the request, with this response.
    Respond { status: u16, headers: Vec<(String, Vec<u8>)>, body: Vec<u8> },
}

/// An HTTP call of a script.
pub(crate) struct Call {
    pub(crate) cluster: String,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    pub(crate) body: Vec<u8>,
    pub(crate) timeout: Duration,
    /// The script does not wait for the response.
    pub(crate) is_asynchronous: bool,
    /// The returned table has a list of values for a repeated field.
    all_values: bool,
}

/// The result of a [`ScriptRequest`].
pub(crate) enum Input {
    /// Start of the run, or a result without a value.
    None,
    /// The body is in the stream; the flag says that the script gets an object.
    Body(bool),
    /// The pieces of the body are in the stream.
    Chunks(usize),
    /// The trailers are in the stream, if the flag is set.
    Trailers(bool),
    /// The response of a call.
    Response { head: Headers, status: u16, body: Vec<u8>, all_values: bool },
    /// The request failed; the function raises an error.
    Failed(String),
}

/// The state of a run after a step.
pub(crate) enum RunState {
    /// The function has returned.
    Done,
    /// The script waits.
    Wants(ScriptRequest),
    /// The script failed.
    Failed(String),
}

impl States {
    /// Returns the state of a script; loads the script on first use.
    pub(crate) fn get(&self, script: &Arc<LuaScript>) -> Result<Rc<State>, String> {
        let mut states = self.0.borrow_mut();
        if let Some((_, state)) = states.iter().find(|(known, _)| ptr_eq(known, script)) {
            return Ok(state.clone());
        }
        // Scripts of earlier configurations.
        states.retain(|(known, _)| known.strong_count() > 0);
        let state = Rc::new(State::load(&script.source)?);
        states.push((Arc::downgrade(script), state.clone()));
        Ok(state)
    }

    /// Drops a state that has reached its memory limit. Runs that use it continue with it.
    fn discard(&self, state: &Rc<State>) {
        self.0.borrow_mut().retain(|(_, known)| !Rc::ptr_eq(known, state));
    }

    /// Continues a run. Drops its state if the script has failed for lack of memory.
    pub(crate) fn resume(&self, run: &mut Execution, input: Input) -> RunState {
        run.resume(input).unwrap_or_else(|error| {
            if is_memory(&error) {
                self.discard(&run.state);
            }
            RunState::Failed(loggable(&message(&error)))
        })
    }
}

fn ptr_eq(known: &Weak<LuaScript>, script: &Arc<LuaScript>) -> bool {
    std::ptr::eq(known.as_ptr(), Arc::as_ptr(script))
}

fn is_memory(error: &mlua::Error) -> bool {
    match error {
        mlua::Error::MemoryError(_) => true,
        mlua::Error::CallbackError { cause, .. } => is_memory(cause),
        _ => false,
    }
}

/// Checks a script and returns the functions that it defines.
///
/// # Errors
///
/// The script does not compile, or its top level fails.
pub(crate) fn check(source: &str) -> Result<LuaScript, String> {
    let state = State::load(source)?;
    let has = |hook: Hook| state.lua.globals().get::<Option<Function>>(hook.name());
    let has = |hook| has(hook).map_err(|error| error.to_string()).map(|function| function.is_some());
    Ok(LuaScript {
        source: source.into(),
        handles_request: has(Hook::Request)?,
        handles_response: has(Hook::Response)?,
    })
}

impl State {
    /// Returns a state that has run the top level of a script.
    fn load(source: &str) -> Result<Self, String> {
        Self::create(source).map_err(|error| loggable(&message(&error)))
    }

    fn create(source: &str) -> mlua::Result<Self> {
        let libraries = StdLib::STRING
            | StdLib::TABLE
            | StdLib::MATH
            | StdLib::COROUTINE
            | StdLib::BIT
            | StdLib::UTF8
            | StdLib::OS;
        let lua = Lua::new_with(libraries, LuaOptions::new())?;
        lua.set_memory_limit(MAX_MEMORY)?;
        let steps = Rc::new(Cell::new(MAX_STEPS));
        let left = steps.clone();
        lua.set_interrupt(move |_| match left.get().checked_sub(1) {
            Some(fewer) => {
                left.set(fewer);
                Ok(VmState::Continue)
            }
            None => Err(mlua::Error::runtime("the script exceeds its limit of steps")),
        });
        let token = lua.create_table()?;
        let log = lua.create_function(|_, text: mlua::String| {
            info!("script log: {}", loggable(&text.to_string_lossy()));
            Ok(())
        })?;
        let text = lua.create_function(|lua, problem: Value| match problem {
            Value::Error(error) => lua.create_string(first_line(&message(&error))).map(Value::String),
            other => Ok(other),
        })?;
        let prelude = lua.load(PRELUDE).set_name("=prelude");
        let methods: Vec<(String, Function)> =
            prelude.call::<Table>((token.clone(), log, text))?.pairs().collect::<mlua::Result<_>>()?;
        lua.register_userdata_type::<Handle>(|registry| {
            Handle::register(registry);
            for (name, function) in methods {
                registry.add_field(name, function);
            }
        })?;
        lua.load(source).set_name("=script").set_mode(mlua::ChunkMode::Text).exec()?;
        Ok(Self { lua, steps, token })
    }
}

impl Execution {
    /// Begins a run of a script.
    pub(crate) fn new(state: Rc<State>, hook: Hook, stream: SharedStream) -> Result<Self, String> {
        let make = || -> mlua::Result<Thread> {
            // Luau does not collect garbage when memory runs out.
            if state.lua.used_memory() > MAX_MEMORY / 2 {
                state.lua.gc_collect()?;
            }
            let function: Function = state.lua.globals().get(hook.name())?;
            state.lua.create_thread(function)
        };
        let thread = make().map_err(|error| loggable(&message(&error)))?;
        Ok(Self { state, thread, stream, steps: MAX_STEPS, calls: 0 })
    }

    /// Continues the script until it waits or ends.
    fn resume(&mut self, input: Input) -> mlua::Result<RunState> {
        let is_start = matches!(input, Input::None) && self.steps == MAX_STEPS;
        let arguments = if is_start {
            let handle = self.state.lua.create_any_userdata(Handle(self.stream.clone()))?;
            MultiValue::from_vec(vec![Value::UserData(handle)])
        } else {
            self.arguments(input)?
        };
        self.state.steps.set(self.steps);
        let result = self.thread.resume::<MultiValue>(arguments);
        // A run counts at least one step, so that `is_start` is true only once.
        self.steps = self.state.steps.get().min(MAX_STEPS - 1);
        let mut values = result?.into_iter();
        if self.thread.status() != ThreadStatus::Resumable {
            return Ok(RunState::Done);
        }
        match values.next() {
            Some(Value::Table(mark)) if mark == self.state.token => {}
            _ => return Err(mlua::Error::runtime("script performed an unexpected yield")),
        }
        match self.wish(values.collect()) {
            Ok(wish) => Ok(RunState::Wants(wish)),
            // An invalid argument is an error in the script, which it may catch.
            Err(error) => self.resume(Input::Failed(first_line(&message(&error)).to_owned())),
        }
    }

    fn arguments(&self, input: Input) -> mlua::Result<MultiValue> {
        let lua = &self.state.lua;
        let mut values = vec![Value::Boolean(!matches!(input, Input::Failed(_)))];
        match input {
            Input::None | Input::Body(false) | Input::Trailers(false) => {}
            Input::Body(true) => {
                values.push(Value::UserData(lua.create_userdata(Buffer::new(&self.stream, 0))?));
            }
            Input::Chunks(count) => {
                let chunks = lua.create_table()?;
                for index in 0..count {
                    chunks.push(Buffer::new(&self.stream, index))?;
                }
                values.push(Value::Table(chunks));
            }
            Input::Trailers(true) => {
                let trailers = HeaderMap::new(&self.stream, Part::Trailers);
                values.push(Value::UserData(lua.create_userdata(trailers)?));
            }
            Input::Response { head, status, body, all_values } => {
                values.push(Value::Table(response(lua, &head, status, all_values)?));
                if !body.is_empty() {
                    values.push(Value::String(lua.create_string(body)?));
                }
            }
            Input::Failed(message) => values.push(Value::String(lua.create_string(message)?)),
        }
        Ok(MultiValue::from_vec(values))
    }

    /// Returns the request that the API has yielded.
    fn wish(&mut self, values: Vec<Value>) -> mlua::Result<ScriptRequest> {
        let mut values = values.into_iter();
        let name = match values.next() {
            Some(Value::String(name)) => name.to_string_lossy(),
            _ => String::new(),
        };
        let mut next = || values.next().unwrap_or(Value::Nil);
        match name.as_str() {
            "body" => Ok(ScriptRequest::Body(matches!(next(), Value::Boolean(true)))),
            "chunks" => Ok(ScriptRequest::Chunks),
            "trailers" => Ok(ScriptRequest::Trailers),
            "respond" => {
                let headers = fields(&self.table(next(), "respond() headers")?)?;
                let body = self.content(next(), "respond() body")?;
                let status = headers.iter().find(|(name, _)| name == ":status").map(|(_, value)| value);
                let status = status.and_then(|value| std::str::from_utf8(value).ok()?.parse::<u16>().ok());
                match status.filter(|status| (200..600).contains(status)) {
                    Some(status) => Ok(ScriptRequest::Respond { status, headers, body }),
                    None => Err(mlua::Error::runtime(":status must be between 200-599")),
                }
            }
            _ => {
                self.calls += 1;
                if self.calls > MAX_CALLS {
                    return Err(mlua::Error::runtime(format!("more than {MAX_CALLS} HTTP calls in one run")));
                }
                let Value::String(cluster) = next() else {
                    return Err(mlua::Error::runtime("http call cluster must be a string"));
                };
                let cluster = cluster.to_string_lossy();
                let headers = fields(&self.table(next(), "http call headers")?)?;
                let has = |name: &str| headers.iter().any(|(known, _)| known == name);
                if !(has(":path") && has(":method") && has(":authority")) {
                    let problem = "http call headers must include ':path', ':method', and ':authority'";
                    return Err(mlua::Error::runtime(problem));
                }
                let body = self.content(next(), "http call body")?;
                let CallOptions { timeout, is_asynchronous, all_values } = options(next(), &next())?;
                Ok(ScriptRequest::Call(Call { cluster, headers, body, timeout, is_asynchronous, all_values }))
            }
        }
    }

    fn table(&self, value: Value, what: &str) -> mlua::Result<Table> {
        match value {
            Value::Table(table) => Ok(table),
            other => Err(mlua::Error::runtime(format!("{what}: table expected, got {}", other.type_name()))),
        }
    }

    /// Returns the bytes of an optional string.
    fn content(&self, value: Value, what: &str) -> mlua::Result<Vec<u8>> {
        if value.is_nil() {
            return Ok(Vec::new());
        }
        let kind = value.type_name();
        let text = self.state.lua.coerce_string(value)?;
        let text = text
            .ok_or_else(|| mlua::Error::runtime(format!("{what}: string expected, got {kind}")))?
            .as_bytes()
            .to_vec();
        if text.len() > MAX_BODY {
            return Err(mlua::Error::runtime(format!("{what} exceeds {MAX_BODY} bytes")));
        }
        Ok(text)
    }
}

impl Call {
    /// Returns the input for the script: the response, or 503 if the call failed, as in Envoy.
    pub(crate) fn input(&self, response: Option<(Headers, u16, Vec<u8>)>) -> Input {
        let failed = || (Headers::default(), 503, b"upstream failure".to_vec());
        let (head, status, body) = response.unwrap_or_else(failed);
        Input::Response { head, status, body, all_values: self.all_values }
    }
}

/// Options of an HTTP call.
struct CallOptions {
    timeout: Duration,
    is_asynchronous: bool,
    all_values: bool,
}

fn options(first: Value, second: &Value) -> mlua::Result<CallOptions> {
    let mut options = CallOptions { timeout: CALL_TIMEOUT, is_asynchronous: false, all_values: false };
    let Value::Table(table) = first else {
        options.timeout = timeout(&first)?;
        options.is_asynchronous = match second {
            Value::Nil => false,
            Value::Boolean(flag) => *flag,
            _ => {
                let problem = "http call asynchronous flag must be 'true', 'false', or empty";
                return Err(mlua::Error::runtime(problem));
            }
        };
        return Ok(options);
    };
    for pair in table.pairs::<mlua::String, Value>() {
        let (key, value) = pair?;
        let key = key.to_string_lossy();
        match (key.as_str(), value) {
            ("timeout_ms", value) => options.timeout = timeout(&value)?,
            ("asynchronous", Value::Boolean(flag)) => options.is_asynchronous = flag,
            ("return_duplicate_headers", Value::Boolean(flag)) => options.all_values = flag,
            // Calls of scripts have no span and no `x-forwarded-for`.
            ("trace_sampled" | "send_xff", Value::Boolean(_)) => {}
            (key, value) => {
                let problem =
                    format!("http call option {key:?} with a {} is not supported", value.type_name());
                return Err(mlua::Error::runtime(problem));
            }
        }
    }
    Ok(options)
}

fn timeout(value: &Value) -> mlua::Result<Duration> {
    let millis = match value {
        Value::Integer(millis) => *millis as f64,
        Value::Number(millis) => *millis,
        other => {
            let problem = format!("http call timeout: number expected, got {}", other.type_name());
            return Err(mlua::Error::runtime(problem));
        }
    };
    if millis.is_nan() || millis < 0.0 {
        return Err(mlua::Error::runtime("http call timeout must be >= 0"));
    }
    // In Envoy, 0 disables the timeout; here it selects the default.
    let time = Duration::from_millis(millis.min(3_600_000.0) as u64);
    Ok(if time.is_zero() { CALL_TIMEOUT } else { time })
}

/// Returns the table of a response's fields.
fn response(lua: &Lua, head: &Headers, status: u16, all_values: bool) -> mlua::Result<Table> {
    let table = lua.create_table()?;
    table.raw_set(":status", status.to_string())?;
    for (name, value) in head.iter() {
        let (name, value) = (lua.create_string(name)?, lua.create_string(value)?);
        match table.raw_get::<Value>(name.clone())? {
            Value::Table(values) if all_values => values.push(value)?,
            Value::String(first) if all_values => {
                table.raw_set(name, lua.create_sequence_from([first, value])?)?;
            }
            _ => table.raw_set(name, value)?,
        }
    }
    Ok(table)
}

/// Returns the text of an error, without the kind that its display adds.
fn message(error: &mlua::Error) -> String {
    match error {
        mlua::Error::RuntimeError(text) => text.clone(),
        mlua::Error::CallbackError { cause, .. } => message(cause),
        other => other.to_string(),
    }
}

/// Returns a message without the trace that follows it.
fn first_line(message: &str) -> &str {
    message.lines().next().unwrap_or_default()
}

/// Divides a body into the pieces that `bodyChunks()` returns.
pub(super) fn pieces(body: Vec<u8>) -> Vec<Vec<u8>> {
    if body.len() <= CHUNK { vec![body] } else { body.chunks(CHUNK).map(<[u8]>::to_vec).collect() }
}
