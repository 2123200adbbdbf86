//! The filters between the connection manager and the router, each in its turn, in the order of the configuration.

use std::{
    future::poll_fn,
    sync::Arc,
    task::Poll,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use serde_json::{Map, Value};
use tracing::warn;

use crate::{
    call,
    request::{
        authorization::{self, Decision as Said, Question},
        exchange::{Client, Deadlines},
        story::{RequestContext, ResponseField},
    },
};
use skysail_http::{
    flow::{Broken, Flow},
    grpc_web::{self, Through, Web},
    head::{RequestHead, ResponseHead, Version},
    timer,
};
use skysail_policy::{
    config::{
        authorization::ExternalAuthorization,
        http::{Does, Filter, metadata},
        jwt::{Jwt, JwtProvider, KeySet, Keys},
        limit::RateLimit,
        policy::Policy,
        route::{Cors, Setting},
    },
    cors,
    error::{Error, Flags, Kind},
    fault::{self, FaultDecision},
    headers,
    jwt::{self, JwtOutcome},
    matching,
    rbac::{self, Subject, Tally, Verdict},
    route::{self, Missing},
};

/// What the filters make of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filtered {
    /// It goes on.
    Go,
    /// It has been answered.
    Answered,
}

/// What a filter needs more than a look for.
enum Act<'a> {
    /// To wait, or to fail.
    Disturb(FaultDecision),
    /// To answer a preflight.
    Answer(ResponseHead),
    /// To refuse what is too much.
    Refuse(&'a RateLimit),
    /// To ask another service.
    Ask(&'a ExternalAuthorization, Option<&'a Setting>),
    /// To check tokens, for whose keys it may have to ask.
    Require(&'a Jwt, Option<&'a Setting>),
}

impl<'a> RequestContext<'a> {
    /// Lets each filter have its say, until one answers.
    pub(crate) async fn filter(&mut self, body: &mut Flow) -> Result<Filtered, Error> {
        let manager = self.manager;
        for filter in &manager.filters {
            if filter.is_idle() && self.found.is_ok_and(|found| found.route.filters.is_empty()) {
                continue;
            }
            // Boxed, as it is seldom needed and every connection would have room for it.
            if let Some(act) = self.look(filter, body)?
                && Box::pin(self.act(act, body)).await? == Filtered::Answered
            {
                return Ok(Filtered::Answered);
            }
        }
        Ok(Filtered::Go)
    }

    /// What a filter does at once, which is all that most have to do.
    fn look(&mut self, filter: &'a Filter, body: &mut Flow) -> Result<Option<Act<'a>>, Error> {
        let setting = self.found.ok().and_then(|found| found.route.setting(&filter.name));
        if matches!(setting, Some(Setting::Off)) || (filter.disabled && setting.is_none()) {
            return Ok(None);
        }
        match (&filter.does, setting) {
            (Does::Authorize(_), Some(Setting::Authorize(policy))) | (Does::Authorize(policy), _) => {
                self.authorize(policy)?;
            }
            (Does::Fault(_), Some(Setting::Fault(fault))) | (Does::Fault(fault), _) => {
                let decision = fault::decide(fault, self.head, &mut self.worker.dice.borrow_mut());
                return Ok((decision != FaultDecision::default()).then_some(Act::Disturb(decision)));
            }
            (Does::Limit(_), Some(Setting::Limit(limit))) | (Does::Limit(limit), _) => {
                if !limit.unenforced.is_empty() {
                    self.visits.begin(filter, setting);
                }
                return Ok(self.is_too_much(limit).then_some(Act::Refuse(limit)));
            }
            (Does::Ask(config), setting) => {
                self.visits.begin(filter, setting);
                return Ok(Some(Act::Ask(config, setting)));
            }
            (Does::Jwt(jwt), setting) => {
                self.visits.begin(filter, setting);
                return Ok(Some(Act::Require(jwt, setting)));
            }
            // What routes answer themselves is not shared, as in Envoy.
            (Does::Cors, Some(Setting::Cors(cors))) if self.leads_on() => return Ok(self.share(cors)),
            (Does::Cors, _) => {}
            (Does::Compress(compressor), _) => {
                self.compressor = Some((compressor, compressor.is_accepted(self.head)));
            }
            (Does::GrpcWeb, _) => {
                if grpc_web::is_spoken(self.head) {
                    self.visits.begin(filter, setting);
                    self.visits.keep(self.head);
                    self.web = grpc_web::request(self.head);
                }
                self.grpc |= self.web.is_some();
                if let Some(Web { text: true, .. }) = self.web {
                    body.lead(Through::In(Vec::new()));
                }
            }
        }
        Ok(None)
    }

    async fn act(&mut self, act: Act<'_>, body: &mut Flow) -> Result<Filtered, Error> {
        match act {
            Act::Disturb(decision) => self.disturb(decision, body).await,
            Act::Answer(answer) => {
                *self.response = answer;
                self.told.details = "cors_response".into();
                self.answer(b"", body).await?;
                Ok(Filtered::Answered)
            }
            Act::Refuse(limit) => self.refuse(limit, body).await,
            Act::Ask(config, setting) => self.consult(config, setting, body).await,
            Act::Require(jwt, setting) => self.require(jwt, setting, body).await,
        }
    }

    fn authorize(&mut self, policy: &Arc<Policy>) -> Result<(), Error> {
        let origin = &self.downstream.origin;
        let subject = Subject {
            head: Some(self.head),
            peer: &origin.peer,
            source: origin.direct,
            remote: self.client,
            destination: origin.destination,
            server_name: origin.server_name(),
            metadata: self.metadata.as_deref(),
        };
        let mut tally = Tally::default();
        let verdict = rbac::check(std::slice::from_ref(policy), &subject, &mut tally);
        let counters = self.counters;
        counters.rbac_allowed.add(tally.allowed.into());
        counters.rbac_denied.add(tally.denied.into());
        counters.rbac_shadow_allowed.add(tally.shadow_allowed.into());
        counters.rbac_shadow_denied.add(tally.shadow_denied.into());
        self.learn(metadata::RBAC, tally.found);
        match verdict {
            Verdict::Allow => Ok(()),
            Verdict::Deny { details, .. } => Err(Error::new(Kind::Denied(details))),
        }
    }

    /// Keeps what a filter found out, for those after it and for the record.
    fn learn(&mut self, filter: &str, found: impl IntoIterator<Item = (String, Value)>) {
        let mut found = found.into_iter().peekable();
        if found.peek().is_some() {
            matching::learn(self.metadata.get_or_insert_default(), filter, found);
        }
    }

    async fn disturb(&mut self, decision: FaultDecision, body: &mut Flow) -> Result<Filtered, Error> {
        if let Some(delay) = decision.delay {
            self.counters.fault_delays.inc();
            self.told.flags.insert(Flags::DI);
            self.pause(delay, body, &mut Deadlines::default()).await?;
        }
        let Some(kind) = decision.failure() else { return Ok(Filtered::Go) };
        self.counters.fault_aborts.inc();
        Err(Error::new(kind))
    }

    /// Shares with other origins what the policy lets them have.
    fn share(&mut self, cors: &Cors) -> Option<Act<'a>> {
        match cors::decide(cors, self.head) {
            cors::CorsDecision::Pass => None,
            cors::CorsDecision::Mark(marks) => {
                let marks = marks.into_iter();
                self.marks.extend(marks.map(|(name, value)| ResponseField { name, value, besides: false }));
                None
            }
            cors::CorsDecision::Answer(answer) => Some(Act::Answer(answer)),
        }
    }

    /// Asks for tokens.
    async fn require(
        &mut self,
        jwt: &Jwt,
        setting: Option<&Setting>,
        body: &mut Flow,
    ) -> Result<Filtered, Error> {
        if jwt::is_unclean(jwt, self.head) {
            self.visits.keep(self.head);
            jwt::sanitize(jwt, self.head);
        }
        if jwt.bypass_preflight && cors::is_preflight(self.head) {
            return Ok(Filtered::Go);
        }
        let requirement = jwt::requirement(jwt, setting, self.head, &mut self.worker.dice.borrow_mut());
        let requirement = match requirement {
            Ok(Some(requirement)) => requirement,
            Ok(None) => return Ok(Filtered::Go),
            Err(problem) => {
                self.counters.jwt_denied.inc();
                self.told.details =
                    format!("jwt_authn_access_denied{{{}}}", problem.replace(' ', "_")).into();
                let text = format!("Failed JWT authentication: {problem}");
                self.reply(403, &[], text.as_bytes(), body).await?;
                return Ok(Filtered::Answered);
            }
        };
        let (mut failed, mut fetched) = (Vec::new(), Vec::new());
        let verdict = loop {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            match jwt::check(jwt, requirement, self.head, now, &failed) {
                JwtOutcome::NeedsKeys(provider) => {
                    // Once, even if what came is too old at once.
                    let again = fetched.contains(&provider);
                    fetched.push(provider);
                    if again || !self.fetch_keys(&jwt.providers[provider], body).await? {
                        failed.push(provider);
                    }
                }
                JwtOutcome::Pass(good) => break Ok(good),
                JwtOutcome::Refused(status) => break Err(status),
            }
        };
        match verdict {
            Ok(good) => {
                self.counters.jwt_allowed.inc();
                if !good.is_empty() {
                    self.visits.keep(self.head);
                }
                let mut found = Map::new();
                if jwt::apply(good, self.head, &mut found) {
                    self.find_route();
                }
                self.visits.learn(&found);
                self.learn(metadata::JWT, found);
                Ok(Filtered::Go)
            }
            Err(status) => {
                self.counters.jwt_denied.inc();
                let words = status.words();
                self.told.details = format!("jwt_authn_access_denied{{{}}}", words.replace(' ', "_")).into();
                let challenge = jwt::challenge(status, self.head);
                self.reply(
                    status.http(),
                    &[("www-authenticate".into(), challenge.as_bytes().into())],
                    words.as_bytes(),
                    body,
                )
                .await?;
                Ok(Filtered::Answered)
            }
        }
    }

    /// Takes a token for the request; whether there is none, and it is to be refused.
    fn is_too_much(&mut self, limit: &RateLimit) -> bool {
        let roll = |share| route::roll(&mut self.worker.dice.borrow_mut(), share);
        let Some(bucket) = limit.bucket.as_ref().filter(|_| roll(limit.enabled)) else { return false };
        self.counters.limit_enabled.inc();
        if bucket.take(Instant::now()) {
            self.counters.limit_ok.inc();
            return false;
        }
        self.counters.limit_limited.inc();
        let enforced = roll(limit.enforced);
        if enforced {
            self.counters.limit_enforced.inc();
        } else if !limit.unenforced.is_empty() {
            self.visits.keep(self.head);
            let mut head = std::mem::take(self.head);
            headers::apply_request(&limit.unenforced, &mut head, &self.record());
            *self.head = head;
        }
        enforced
    }

    async fn refuse(&mut self, limit: &RateLimit, body: &mut Flow) -> Result<Filtered, Error> {
        self.told.flags.insert(Flags::RL);
        self.told.details = "local_rate_limited".into();
        self.begin_reply(limit.status);
        self.change_response(&limit.answer);
        if limit.resource_exhausted && self.grpc {
            self.response.set("grpc-status", b"8");
        }
        self.put_in_words(b"local_rate_limited", body).await?;
        Ok(Filtered::Answered)
    }

    /// Asks another service.
    async fn consult(
        &mut self,
        config: &ExternalAuthorization,
        setting: Option<&Setting>,
        body: &mut Flow,
    ) -> Result<Filtered, Error> {
        let is_wanted = config
            .enabled_metadata
            .as_ref()
            .is_none_or(|test| matching::metadata(test, self.metadata.as_deref()));
        // What has no route leads nowhere anyway; Envoy does not ask about it either.
        let has_route = !matches!(self.found, Err(Missing::Route));
        if !is_wanted {
            self.visits.pass_over();
            return Ok(Filtered::Go);
        }
        if !has_route {
            self.visits.pass_over();
        }
        if !has_route || !route::roll(&mut self.worker.dice.borrow_mut(), config.enabled) {
            return Ok(Filtered::Go);
        }
        let (extensions, without_body) = match setting {
            Some(Setting::Question { extensions, without_body }) => (&extensions[..], *without_body),
            _ => (&[][..], false),
        };
        let told = config.body.filter(|_| !without_body);
        let mut content = None;
        if let Some(told) = told {
            if self.head.has("expect") {
                self.visits.keep(self.head);
            }
            self.collect(body, told.most).await?;
            let kept = body.kept().unwrap_or_default();
            let partial = !body.is_collected() || kept.len() > told.most;
            if partial && !told.partial {
                return Err(Error::new(Kind::BodyTooLarge));
            }
            // What has nothing but trailers has no body, as in Envoy.
            let kept = body.kept().filter(|kept| !kept.is_empty() || body.trailers().is_none());
            content = kept.map(|kept| (kept[..told.most.min(kept.len())].to_vec(), partial));
        }
        let head = self.head.clone();
        let question = Question {
            head: &head,
            origin: &self.downstream.origin.clone(),
            body: content.as_ref().map(|(content, partial)| (&content[..], *partial)),
            received: body.bytes,
            extensions,
            start: self.start,
        };
        let (worker, snapshot) = (self.worker, self.snapshot);
        let ask = Box::pin(authorization::ask(worker, snapshot, config, &question));
        // A client that goes away in the meantime ends it.
        let decision = async { Ok(ask.await) };
        let decision =
            Client::new(self.downstream, &mut Deadlines::default(), body, false).wait(decision).await?;
        if decision.as_ref().map_or(true, Said::touches_request) {
            self.visits.keep(&head);
        }
        self.heed(config, decision, body).await
    }

    /// Does what the service said.
    async fn heed(
        &mut self,
        config: &ExternalAuthorization,
        decision: Result<Said, Error>,
        body: &mut Flow,
    ) -> Result<Filtered, Error> {
        match decision {
            Ok(Said::Allow(mut changes)) => {
                self.counters.ext_authz_ok.inc();
                changes.apply(self.head);
                if config.clear_route && changes.touch_request() {
                    self.find_route();
                }
                let added = std::mem::take(&mut changes.answer).into_iter();
                self.marks.extend(added.map(|(name, value)| ResponseField { name, value, besides: true }));
                self.visits.learn(&changes.metadata);
                self.learn(metadata::EXT_AUTHZ, changes.metadata);
                Ok(Filtered::Go)
            }
            Ok(Said::Deny { status, headers, body: text }) => {
                self.counters.ext_authz_denied.inc();
                self.told.flags.insert(Flags::UAEX);
                self.told.details = "ext_authz_denied".into();
                self.reply(status, &headers, &text, body).await?;
                Ok(Filtered::Answered)
            }
            Err(error) => {
                self.counters.ext_authz_error.inc();
                warn!("{} cannot be asked for authorization: {error}", config.cluster);
                if config.failure_allowed {
                    if config.failure_marked {
                        self.head.append("x-envoy-auth-failure-mode-allowed", b"true");
                    }
                    return Ok(Filtered::Go);
                }
                self.told.flags.insert(Flags::UAEX);
                self.told.details = "ext_authz_error".into();
                self.reply(config.status_on_error, &[], b"", body).await?;
                Ok(Filtered::Answered)
            }
        }
    }

    /// Reads the request's body, up to more than `most`.
    async fn collect(&mut self, body: &mut Flow, most: usize) -> Result<(), Error> {
        if self.head.header("expect").is_some_and(|value| value.eq_ignore_ascii_case(b"100-continue")) {
            // It waits for that before it sends what is waited for here.
            self.head.remove("expect");
            self.downstream.wire.interim(&ResponseHead::build(100, &[]), self.head.method());
        }
        let wire = &mut self.downstream.wire;
        let read = poll_fn(|cx| {
            if matches!(wire.poll_flush(cx), Poll::Ready(Err(_))) {
                return Poll::Ready(Err(Broken::Receiver));
            }
            body.poll_collect(cx, wire, most)
        });
        let late = match self.manager.request_timeout {
            Some(_) => Kind::RequestTimeout,
            None => Kind::StreamIdle(false),
        };
        let limit = self.manager.request_timeout.or(self.manager.stream_idle_timeout);
        let read = match limit {
            Some(limit) => timer::timeout(limit, read).await,
            None => Some(read.await),
        };
        match read {
            Some(Ok(())) => Ok(()),
            Some(Err(Broken::Malformed)) => Err(Error::new(Kind::DownstreamProtocol)),
            Some(Err(_)) => Err(Error::new(Kind::DownstreamClosed)),
            None => Err(Error::new(late)),
        }
    }

    /// Fetches a provider's keys for all workers; whether there are some now.
    async fn fetch_keys(&mut self, provider: &JwtProvider, body: &mut Flow) -> Result<bool, Error> {
        let Keys::Remote(remote) = &provider.keys else { return Ok(true) };
        let mut head = RequestHead::build("GET", &remote.path, &remote.authority, &[]);
        head.version = Version::Http11;
        let (worker, snapshot) = (self.worker, self.snapshot);
        let ask = Box::pin(call::ask(worker, snapshot, &remote.cluster, &head, b"", remote.timeout));
        // A client that goes away in the meantime ends it.
        let asked = async { Ok(ask.await) };
        let asked = Client::new(self.downstream, &mut Deadlines::default(), body, false).wait(asked).await?;
        let keys = match asked {
            Ok(answer) if answer.head.status() == 200 => KeySet::parse(&answer.content),
            Ok(answer) => Err(format!("was answered with {}", answer.head.status())),
            Err(error) => Err(format!("cannot be had: {error}")),
        };
        match keys {
            Ok(keys) => {
                let until = Instant::now() + remote.lifetime;
                remote.known.store(Some(Arc::new((until, Arc::new(keys)))));
                Ok(true)
            }
            Err(problem) => {
                warn!("the key set of {} at {}{} {problem}", provider.name, remote.authority, remote.path);
                Ok(false)
            }
        }
    }
}
