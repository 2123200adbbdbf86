//! Runs the Lua scripts of a request: `envoy_on_request` among the filters, `envoy_on_response` before the response is
//! sent. For responses it also runs external processing, because the filters of a response run in one sequence, in
//! reverse order as in Envoy.
//!
//! A script that waits is a suspended coroutine; see [`crate::script`]. While it runs, it owns both heads.

use std::{cell::RefCell, mem, rc::Rc};

use serde_json::{Map, Value};
use tracing::debug;

use crate::{
    call,
    overload::limit_log::{self, Limit},
    request::{
        context::RequestContext,
        response_body::{BodySource, FilterOutcome, MAX_BODY, ResponseBody, set_length},
        routing,
        transfer::{self, Deadlines, unless_closed},
    },
    script::{
        Call, Execution, Hook, Info, Input, MessageKind, RunState, ScriptRequest, SharedStream, Stream,
    },
};
use skysail_http::{
    flow::Flow,
    head::{Headers, RequestHead, ResponseHead},
    http1::Framing,
};
use skysail_policy::{
    config::{
        http::{Filter, FilterKind},
        lua::LuaSelection,
        route::Setting,
    },
    error::{Error, Kind},
};

/// Name of the filter in metadata of routes, besides the name in the configuration.
const LUA: &str = "envoy.filters.http.lua";

/// A response that scripts and external processing have handled.
pub(crate) struct FilteredResponse {
    /// The body, if one of these filters has read it.
    pub(crate) body: Option<Box<Flow>>,
    /// Whether the whole request has been sent.
    pub(crate) is_sent: bool,
}

impl<'a> RequestContext<'a> {
    /// Runs a script for the request. Returns whether the script has answered it.
    pub(crate) async fn run_request_script(
        &mut self,
        filter: &Filter,
        selection: LuaSelection<'_>,
        clear_route: bool,
    ) -> Result<bool, Error> {
        let stream = self.stream(MessageKind::Request, filter, selection);
        let outcome = self.run(&stream, selection, None).await?;
        if outcome != FilterOutcome::Continue {
            return Ok(true);
        }
        let stream = &mut *stream.borrow_mut();
        if stream.has_new_body || stream.has_new_trailers {
            let content = stream.body.take().map(|pieces| pieces.concat());
            self.replace_request_body(content, stream.trailers.take());
        }
        for (namespace, found) in &stream.added {
            if let Value::Object(found) = found {
                self.decision.filter_results.add_metadata(namespace, found);
            }
        }
        if stream.clears_route || (clear_route && stream.has_new_head) {
            let found = self.outcome.metadata.as_deref();
            routing::find_route(&self.scope, self.exchange.request, found, &mut self.decision);
        }
        Ok(false)
    }

    /// Runs the filters for an upstream's response: scripts and external processing. `body` is its framing, and whether
    /// the whole request has been sent; `None` for a tunnel. Returns `None` if a local reply has been sent instead.
    pub(crate) async fn filter_response(
        &mut self,
        body: Option<(Framing, bool)>,
        deadlines: &mut Deadlines,
    ) -> Result<Option<FilteredResponse>, Error> {
        let source = match body {
            Some((Framing::None, _)) | None => BodySource::None,
            Some((framing, is_sent)) => BodySource::Upstream { framing, flow: None, is_sent, deadlines },
        };
        let was_sent = body.is_some_and(|(_, is_sent)| is_sent);
        let mut response = ResponseBody { source, content: None, trailers: None, is_changed: false };
        match self.run_response_filters(&mut response).await? {
            FilterOutcome::Continue => {}
            FilterOutcome::Answered => return Ok(None),
            FilterOutcome::TooLarge => {
                self.outcome.details = "response_payload_too_large".into();
                self.outcome.reusable = false;
                self.local_reply(500, &[], b"Internal Server Error").await?;
                return Ok(None);
            }
        }
        self.outcome.status = self.exchange.response.status();
        let may_have_body = self.exchange.request.method() != "HEAD"
            && !matches!(self.exchange.response.status(), ..200 | 204 | 304);
        let ResponseBody { source, content, trailers, is_changed } = response;
        let (mut flow, is_sent) = match source {
            BodySource::Upstream { flow, is_sent, .. } => (flow, is_sent),
            BodySource::None | BodySource::Local => (None, was_sent),
        };
        let Some(content) = content else { return Ok(Some(FilteredResponse { body: flow, is_sent })) };
        if is_changed && may_have_body && body.is_some() {
            let framing = set_length(self.exchange.response, content.len(), trailers.is_some());
            let limits = skysail_http::http1::HeadLimits { max_head: 0, max_headers: 0, keep_case: false };
            let mut new =
                flow.take().unwrap_or_else(|| Box::new(Flow::new(Framing::None, framing, limits, true)));
            new.replace(content, framing, trailers);
            flow = Some(new);
        } else if let Some(flow) = &mut flow {
            flow.restart();
        }
        Ok(Some(FilteredResponse { body: flow, is_sent }))
    }

    /// Runs the filters for a local reply, and sends it.
    pub(crate) async fn send_filtered(&mut self, content: &[u8]) -> Result<(), Error> {
        let content = Some(content.to_vec());
        let mut body = ResponseBody { source: BodySource::Local, content, trailers: None, is_changed: false };
        if self.run_response_filters(&mut body).await? == FilterOutcome::Answered {
            return Ok(());
        }
        self.send_local(&body.content.unwrap_or_default()).await
    }

    async fn run_response_filters(&mut self, body: &mut ResponseBody<'_>) -> Result<FilterOutcome, Error> {
        if mem::replace(&mut self.decision.has_run_scripts, true) {
            return Ok(FilterOutcome::Continue);
        }
        let manager = self.scope.manager;
        for filter in manager.filters.iter().rev() {
            let setting = self.decision.found.ok().and_then(|found| found.route.setting(&filter.name));
            if matches!(setting, Some(Setting::Off)) || (filter.disabled && setting.is_none()) {
                continue;
            }
            if let FilterKind::ExternalProcessing(config) = &filter.kind {
                match self.process_response(filter, config, setting, body).await? {
                    FilterOutcome::Continue => continue,
                    ended => return Ok(ended),
                }
            }
            let FilterKind::Lua(lua) = &filter.kind else { continue };
            let selection = lua.select(setting).filter(|(script, _)| script.handles_response);
            let Some(selection) = selection else { continue };
            let stream = self.stream(MessageKind::Response, filter, selection);
            if self.run(&stream, selection, Some(body)).await? == FilterOutcome::TooLarge {
                return Ok(FilterOutcome::TooLarge);
            }
            let mut stream = stream.borrow_mut();
            if stream.has_new_body || stream.has_new_trailers {
                if let Some(pieces) = stream.body.take() {
                    body.content = Some(pieces.concat());
                }
                body.trailers = stream.trailers.take();
                body.is_changed = true;
            }
        }
        Ok(FilterOutcome::Continue)
    }

    /// Runs a script to its end. `response` is the body of the response, or `None` for the request.
    async fn run(
        &mut self,
        stream: &SharedStream,
        (script, _): LuaSelection<'_>,
        mut response: Option<&mut ResponseBody<'_>>,
    ) -> Result<FilterOutcome, Error> {
        let hook = if response.is_some() { Hook::Response } else { Hook::Request };
        let scripts = &self.scope.worker.scripts;
        let begun = scripts.get(script).and_then(|state| Execution::new(state, hook, stream.clone()));
        self.scope.counters.lua_executions.inc();
        let mut run = match begun {
            Ok(run) => run,
            Err(problem) => return Ok(self.note_failure(&problem)),
        };
        let mut input = Input::None;
        loop {
            self.swap_heads(stream, true);
            let step = self.scope.worker.scripts.resume(&mut run, input);
            self.swap_heads(stream, false);
            input = match step {
                RunState::Done => return Ok(FilterOutcome::Continue),
                RunState::Failed(problem) => return Ok(self.note_failure(&problem)),
                RunState::Wants(ScriptRequest::Call(call)) => self.call_for_script(call).await?,
                RunState::Wants(ScriptRequest::Respond { status, headers, body }) => {
                    if response.is_some() {
                        Input::Failed("respond not currently supported in the response path".to_owned())
                    } else if stream.borrow().is_streamed {
                        Input::Failed("respond() cannot be called if headers have been continued".to_owned())
                    } else {
                        self.respond_for_script(status, &headers, &body).await?;
                        return Ok(FilterOutcome::Answered);
                    }
                }
                RunState::Wants(wish) => {
                    if matches!(wish, ScriptRequest::Chunks) && stream.borrow().body.is_some() {
                        Input::Failed("cannot call bodyChunks() after the body has been read".to_owned())
                    } else if matches!(wish, ScriptRequest::Body(_)) && stream.borrow().is_streamed {
                        Input::Failed("cannot call body() after body has been streamed".to_owned())
                    } else if response.is_some() && self.decision.grpc_web.is_some() {
                        Input::Failed("the body of a gRPC-Web response is not available".to_owned())
                    } else {
                        let read = match &mut response {
                            None => self.read_request_body(stream).await?,
                            Some(body) => match self.read_response_body(stream, body).await? {
                                Some(read) => read,
                                None => return Ok(FilterOutcome::TooLarge),
                            },
                        };
                        content_for_script(stream, &wish, read)
                    }
                }
            };
        }
    }

    /// Counts and logs the failure of a script. The message continues, as in Envoy.
    #[cold]
    fn note_failure(&self, problem: &str) -> FilterOutcome {
        self.scope.counters.lua_errors.inc();
        // A client may cause the failure of a script again and again.
        limit_log::log(
            Limit::Script,
            format_args!("{}, script log: {problem}", self.scope.manager.stat_prefix),
        );
        FilterOutcome::Continue
    }

    /// Returns the stream for a run of a script.
    fn stream(&self, side: MessageKind, filter: &Filter, (_, context): LuaSelection<'_>) -> SharedStream {
        let found = self.decision.found.ok();
        let metadata = found.and_then(|found| found.route.metadata.as_ref());
        let metadata = metadata.and_then(|all| all.get(&*filter.name).or_else(|| all.get(LUA)));
        let origin = &self.exchange.downstream.origin;
        let record = self.record();
        Rc::new(RefCell::new(Stream {
            side,
            request: RequestHead::default(),
            response: ResponseHead::default(),
            is_live: false,
            body: None,
            has_new_body: false,
            is_streamed: false,
            trailers: None,
            has_new_trailers: false,
            has_new_head: false,
            clears_route: false,
            info: Info {
                protocol: self.exchange.request.version.as_str(),
                route_name: found.map(|found| found.route.name.clone()).unwrap_or_default(),
                local: origin.destination,
                direct_local: origin.dialled,
                remote: record.downstream_remote.unwrap_or(origin.source),
                direct_remote: origin.direct,
                server_name: origin.server_name().map(str::to_owned),
                peer: origin.peer.clone(),
            },
            metadata: Map::new(),
            added: Map::new(),
            added_size: 0,
            route_metadata: metadata.and_then(Value::as_object).cloned().unwrap_or_default(),
            context: context.clone(),
        }))
    }

    /// Moves the heads and the dynamic metadata into the stream, or back.
    fn swap_heads(&mut self, stream: &SharedStream, is_live: bool) {
        let stream = &mut *stream.borrow_mut();
        mem::swap(&mut stream.request, self.exchange.request);
        mem::swap(&mut stream.response, self.exchange.response);
        stream.is_live = is_live;
        if is_live {
            stream.metadata = self.outcome.metadata.take().map(|metadata| *metadata).unwrap_or_default();
        } else {
            let metadata = mem::take(&mut stream.metadata);
            self.outcome.metadata = (!metadata.is_empty()).then(|| Box::new(metadata));
        }
    }

    /// Makes an HTTP call for a script.
    async fn call_for_script(&mut self, call: Call) -> Result<Input, Error> {
        let (worker, snapshot) = (self.scope.worker, self.scope.snapshot);
        if worker.pool(&call.cluster, snapshot).is_none() {
            return Ok(Input::Failed(format!(
                "http call cluster invalid. Must be configured: {:?}",
                call.cluster
            )));
        }
        let value = |name: &str| call.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value);
        let text = |name: &str| value(name).map(|value| String::from_utf8_lossy(value)).unwrap_or_default();
        let mut head = RequestHead::build("GET", "/", "", &[]);
        let mut is_valid = true;
        for name in [":method", ":path", ":authority", ":scheme"] {
            if let Some(value) = value(name) {
                is_valid &= crate::script::set_pseudo(&mut head, name, value);
            }
        }
        if !is_valid {
            let problem =
                format!("http call has an invalid pseudo-header: {} {}", text(":method"), text(":path"));
            return Ok(Input::Failed(problem));
        }
        for (name, value) in call.headers.iter().filter(|(name, _)| !name.starts_with(':')) {
            if name != "host" && name != "content-length" {
                head.append(name, value);
            }
        }
        if !call.body.is_empty() {
            head.set_number("content-length", call.body.len() as u64);
        }
        if call.is_asynchronous {
            let (worker, snapshot) = (worker.clone(), worker.snapshot());
            tokio::task::spawn_local(async move {
                let Call { cluster, body, timeout, .. } = &call;
                if let Err(error) =
                    call::send_request(&worker, &snapshot, cluster, &head, body, *timeout).await
                {
                    debug!("asynchronous call of a script to cluster {cluster} failed: {error}");
                }
            });
            return Ok(Input::None);
        }
        let result =
            Box::pin(call::send_request(worker, snapshot, &call.cluster, &head, &call.body, call.timeout));
        let result = unless_closed(&mut self.exchange, async { Ok(result.await) }).await?;
        let result = result
            .inspect_err(|error| debug!("call of a script to cluster {} failed: {error}", call.cluster));
        Ok(call.input(
            result
                .ok()
                .map(|response| (response.head.headers().clone(), response.head.status(), response.content)),
        ))
    }

    /// Answers the request for a script.
    async fn respond_for_script(
        &mut self,
        status: u16,
        headers: &[(String, Vec<u8>)],
        body: &[u8],
    ) -> Result<(), Error> {
        self.begin_local_reply(status);
        let response = &mut *self.exchange.response;
        for (name, value) in headers.iter().filter(|(name, _)| !name.starts_with(':')) {
            if name != "content-length" {
                response.append(name, value);
            }
        }
        let is_untyped = !body.is_empty() && !response.has("content-type");
        self.outcome.details = "lua_response".into();
        if self.decision.grpc || is_untyped {
            return self.send_text(body).await;
        }
        let may_have_body = !matches!(status, 204 | 304);
        self.send_local(if may_have_body { body } else { b"" }).await
    }

    /// Reads the body of the request. Returns `None` if there is none.
    async fn read_request_body(&mut self, stream: &SharedStream) -> Result<Option<Vec<u8>>, Error> {
        let exchange = &mut self.exchange;
        let is_none = exchange.body.framing() == Framing::None;
        if !is_none {
            transfer::collect(self.scope.manager, exchange, MAX_BODY).await?;
        }
        let body = &exchange.body;
        let kept = body.kept().unwrap_or_default();
        if !(body.is_collected() || is_none) || kept.len() > MAX_BODY {
            return Err(Error::new(Kind::BodyTooLarge));
        }
        let mut stream = stream.borrow_mut();
        if stream.trailers.is_none() {
            stream.trailers = body.trailers().cloned();
        }
        Ok((!is_none).then(|| kept.to_vec()))
    }

    /// Sets the new content and trailers of the request. Without new content, the old one remains.
    fn replace_request_body(&mut self, content: Option<Vec<u8>>, trailers: Option<Headers>) {
        let body = &mut self.exchange.body;
        let content = content.unwrap_or_else(|| body.kept().unwrap_or_default().to_vec());
        let framing = set_length(self.exchange.request, content.len(), trailers.is_some());
        body.replace(content, framing, trailers);
    }

    /// Reads the body of the response. Returns `None` if it exceeds the limit, and `Some(None)` if there is no body.
    async fn read_response_body(
        &mut self,
        stream: &SharedStream,
        body: &mut ResponseBody<'_>,
    ) -> Result<Option<Option<Vec<u8>>>, Error> {
        if !self.load_response_body(body).await? {
            return Ok(None);
        }
        let mut stream = stream.borrow_mut();
        if stream.trailers.is_none() {
            stream.trailers = body.trailers.clone();
        }
        let content = body
            .content
            .as_ref()
            .filter(|content| !content.is_empty() || !matches!(body.source, BodySource::Local));
        Ok(Some(content.cloned()))
    }
}

/// Returns the input for a script that asked for the body or for trailers.
fn content_for_script(stream: &SharedStream, wish: &ScriptRequest, read: Option<Vec<u8>>) -> Input {
    let mut stream = stream.borrow_mut();
    match wish {
        ScriptRequest::Trailers => Input::Trailers(stream.trailers.is_some()),
        ScriptRequest::Chunks => {
            let chunks = read.filter(|body| !body.is_empty());
            Input::Chunks(chunks.map_or(0, |body| stream.set_body(body, true)))
        }
        ScriptRequest::Body(always) => {
            let is_given = read.is_some() || *always;
            if is_given && stream.body.is_none() {
                stream.set_body(read.unwrap_or_default(), false);
            }
            Input::Body(is_given)
        }
        ScriptRequest::Call(_) | ScriptRequest::Respond { .. } => Input::None,
    }
}
