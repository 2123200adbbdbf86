//! The part of a request that a script sees, and the handle to it.

use std::{
    cell::{RefCell, RefMut},
    rc::Rc,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use base64::{Engine as _, prelude::BASE64_STANDARD as BASE64};
use mlua::{Lua, UserDataMethods, Value};
use serde_json::{Map, Value as Json};
use skysail_http::head::{Headers, RequestHead, ResponseHead};
use tracing::{debug, error, info, trace, warn};

use super::{
    MAX_BODY,
    engine::pieces,
    headers::{HeaderMap, Part},
    info::{ConnectionInfo, Info, StreamInfo},
    values,
};

/// Maximum length of a log message in bytes.
const MAX_MESSAGE: usize = 4096;

/// The message that a script handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessageKind {
    Request,
    Response,
}

/// A request or a response, while a script handles it.
pub(crate) struct Stream {
    pub(crate) side: MessageKind,
    /// Both heads are here only while the script runs.
    pub(crate) request: RequestHead,
    pub(crate) response: ResponseHead,
    /// Whether the script runs. Objects of the API fail otherwise.
    pub(crate) is_live: bool,
    /// The body in pieces, as soon as the script has asked for it.
    pub(crate) body: Option<Vec<Vec<u8>>>,
    /// The script has changed the body.
    pub(crate) has_new_body: bool,
    /// The body has been passed on in Envoy's order: the script may not respond any more.
    pub(crate) is_streamed: bool,
    pub(crate) trailers: Option<Headers>,
    /// The script has changed the trailers.
    pub(crate) has_new_trailers: bool,
    /// The script has changed the head.
    pub(crate) has_new_head: bool,
    /// The script has asked for another selection of the route.
    pub(crate) clears_route: bool,
    pub(crate) info: Info,
    /// Dynamic metadata, by filter.
    pub(crate) metadata: Map<String, Json>,
    /// Dynamic metadata that the script has set.
    pub(crate) added: Map<String, Json>,
    /// Bytes of `added`.
    pub(crate) added_size: usize,
    /// Metadata of the route for this filter.
    pub(crate) route_metadata: Map<String, Json>,
    pub(crate) context: Arc<Map<String, Json>>,
}

/// A stream that the objects of a script refer to.
pub(crate) type SharedStream = Rc<RefCell<Stream>>;

/// Returns the stream, if its script runs.
pub(super) fn live(stream: &SharedStream) -> mlua::Result<RefMut<'_, Stream>> {
    match stream.try_borrow_mut() {
        Ok(stream) if stream.is_live => Ok(stream),
        _ => Err(mlua::Error::runtime("object used outside of proper scope")),
    }
}

impl Stream {
    /// Stores the body, divided into pieces if the script iterates over it. Returns the number of pieces.
    pub(crate) fn set_body(&mut self, body: Vec<u8>, is_divided: bool) -> usize {
        let body = if is_divided { pieces(body) } else { vec![body] };
        self.is_streamed |= is_divided;
        self.body.insert(body).len()
    }
}

/// The argument of a script's functions.
pub(super) struct Handle(pub(super) SharedStream);

impl Handle {
    pub(super) fn register(methods: &mut impl UserDataMethods<Self>) {
        methods.add_method("headers", |_, Self(stream), ()| Ok(HeaderMap::new(stream, Part::Head)));
        methods.add_method("streamInfo", |_, Self(stream), ()| Ok(StreamInfo(stream.clone())));
        methods.add_method("connection", |_, Self(stream), ()| Ok(ConnectionInfo(stream.clone())));
        methods.add_method("metadata", |_, Self(stream), ()| {
            Ok(values::Fields(live(stream)?.route_metadata.clone().into()))
        });
        methods.add_method("filterContext", |_, Self(stream), ()| {
            Ok(values::Fields(live(stream)?.context.clone()))
        });
        methods.add_method("clearRouteCache", |_, Self(stream), ()| {
            live(stream)?.clears_route = true;
            Ok(())
        });
        methods.add_method("base64Escape", |_, _, text: mlua::String| Ok(BASE64.encode(text.as_bytes())));
        methods.add_method("timestamp", |_, _, _: Value| Ok(since_epoch() / 1000));
        methods.add_method("timestampString", |_, _, resolution: Option<i64>| match resolution {
            None | Some(0) => Ok((since_epoch() / 1000).to_string()),
            Some(1) => Ok(since_epoch().to_string()),
            _ => Err(mlua::Error::runtime("timestamp resolution must be MILLISECOND or MICROSECOND")),
        });
        methods.add_method("logTrace", log(|text| trace!("script log: {text}")));
        methods.add_method("logDebug", log(|text| debug!("script log: {text}")));
        methods.add_method("logInfo", log(|text| info!("script log: {text}")));
        methods.add_method("logWarn", log(|text| warn!("script log: {text}")));
        methods.add_method("logErr", log(|text| error!("script log: {text}")));
        methods.add_method("logCritical", log(|text| error!("script log: {text}")));
        for name in ["importPublicKey", "verifySignature", "setUpstreamOverrideHost", "connectionStreamInfo"]
        {
            methods.add_method(name, move |_, _, _: Value| -> mlua::Result<()> {
                Err(mlua::Error::runtime(format!("skysail-proxy does not support {name}()")))
            });
        }
    }
}

/// Returns a method that logs a text.
fn log(write: fn(&str)) -> impl Fn(&Lua, &Handle, Value) -> mlua::Result<()> {
    move |lua, _, value| {
        if let Some(text) = lua.coerce_string(value)? {
            write(&loggable(&text.to_string_lossy()));
        }
        Ok(())
    }
}

/// Returns a text without control characters, of limited length. It may come from a client.
pub(super) fn loggable(text: &str) -> String {
    let mut end = text.len().min(MAX_MESSAGE);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Returns the number of microseconds since 1970.
fn since_epoch() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64
}

/// A body, or a piece of it.
pub(super) struct Buffer {
    stream: SharedStream,
    index: usize,
}

impl Buffer {
    pub(super) fn new(stream: &SharedStream, index: usize) -> Self {
        Self { stream: stream.clone(), index }
    }

    /// Calls a function with the bytes.
    fn with<T>(&self, use_bytes: impl FnOnce(&mut Vec<u8>) -> mlua::Result<T>) -> mlua::Result<T> {
        let mut stream = live(&self.stream)?;
        let bytes = stream.body.as_mut().and_then(|body| body.get_mut(self.index));
        use_bytes(bytes.ok_or_else(|| mlua::Error::runtime("the body is gone"))?)
    }
}

impl mlua::UserData for Buffer {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        methods.add_method("length", |_, buffer, ()| buffer.with(|bytes| Ok(bytes.len())));
        methods.add_method("getBytes", |lua, buffer, (index, length): (i64, i64)| {
            buffer.with(|bytes| {
                let (index, length) = (usize::try_from(index).ok(), usize::try_from(length).ok());
                let range = index
                    .zip(length)
                    .and_then(|(index, length)| bytes.get(index..index.checked_add(length)?));
                let problem = "index/length must be >= 0 and (index + length) must be <= buffer size";
                lua.create_string(range.ok_or_else(|| mlua::Error::runtime(problem))?)
            })
        });
        methods.add_method("setBytes", |_, buffer, content: mlua::String| {
            let content = content.as_bytes();
            buffer.with(|bytes| {
                if content.len() > MAX_BODY {
                    return Err(mlua::Error::runtime(format!("the body exceeds {MAX_BODY} bytes")));
                }
                bytes.clear();
                bytes.extend_from_slice(&content);
                Ok(())
            })?;
            live(&buffer.stream)?.has_new_body = true;
            Ok(content.len())
        });
    }
}
