//! The filters between the connection manager and the router, each in its turn, in the order of the configuration.

use std::{
    sync::Arc,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use serde_json::Map;
use tracing::warn;

use crate::{
    call,
    config::{
        http::{Does, Filter},
        jwt::{Jwt, KeySet, Keys, Provider},
        policy::Policy,
        route::{Cors, Fault, Setting},
    },
    cors,
    error::{Error, Flags, Kind},
    exchange::Deadlines,
    fault,
    flow::Flow,
    head::{RequestHead, Version},
    jwt::{self, Outcome},
    policy::{self, Subject, Tally, Verdict},
    route,
    story::Story,
};

/// What the filters make of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filtered {
    /// It goes on.
    Go,
    /// It has been answered.
    Answered,
}

impl Story<'_> {
    /// Lets each filter have its say, until one answers.
    pub(crate) async fn filter(&mut self, body: &mut Flow) -> Result<Filtered, Error> {
        let manager = self.manager;
        for filter in &manager.filters {
            if self.apply(filter, body).await? == Filtered::Answered {
                return Ok(Filtered::Answered);
            }
        }
        Ok(Filtered::Go)
    }

    async fn apply(&mut self, filter: &Filter, body: &mut Flow) -> Result<Filtered, Error> {
        let found = self.found;
        let setting = found.as_ref().ok().and_then(|found| found.route.setting(&filter.name));
        if matches!(setting, Some(Setting::Off)) || (filter.disabled && setting.is_none()) {
            return Ok(Filtered::Go);
        }
        match (&filter.does, setting) {
            (Does::Authorize(_), Some(Setting::Authorize(policy))) | (Does::Authorize(policy), _) => {
                self.authorize(policy)?;
            }
            (Does::Fault(_), Some(Setting::Fault(fault))) | (Does::Fault(fault), _) => {
                self.disturb(fault, body).await?;
            }
            // What routes answer themselves is not shared, as in Envoy.
            (Does::Jwt(jwt), setting) => return self.require(jwt, setting, body).await,
            (Does::Cors, Some(Setting::Cors(cors))) if self.leads_on() => {
                return self.share(cors, body).await;
            }
            (Does::Cors, _) => {}
        }
        Ok(Filtered::Go)
    }

    fn authorize(&mut self, policy: &Arc<Policy>) -> Result<(), Error> {
        let origin = &self.downstream.origin;
        let subject = Subject {
            head: Some(self.head),
            peer: &origin.peer,
            source: origin.source,
            remote: self.client,
            destination: origin.destination,
            server_name: origin.server_name(),
            metadata: &self.metadata,
        };
        let mut tally = Tally::default();
        let verdict = policy::check(std::slice::from_ref(policy), &subject, &mut tally);
        let counters = self.counters;
        counters.rbac_allowed.add(tally.allowed.into());
        counters.rbac_denied.add(tally.denied.into());
        counters.rbac_shadow_allowed.add(tally.shadow_allowed.into());
        counters.rbac_shadow_denied.add(tally.shadow_denied.into());
        if !tally.found.is_empty() {
            self.metadata.insert("envoy.filters.http.rbac".to_owned(), tally.found.into());
        }
        match verdict {
            Verdict::Allow => Ok(()),
            Verdict::Deny { details, .. } => Err(Error::new(Kind::Denied(details))),
        }
    }

    async fn disturb(&mut self, fault: &Fault, body: &mut Flow) -> Result<(), Error> {
        let decision = fault::decide(fault, self.head, &mut self.worker.dice.borrow_mut());
        if let Some(delay) = decision.delay {
            self.counters.fault_delays.inc();
            self.told.flags.insert(Flags::DI);
            self.pause(delay, body, &mut Deadlines::default()).await?;
        }
        let Some(kind) = decision.failure() else { return Ok(()) };
        self.counters.fault_aborts.inc();
        Err(Error::new(kind))
    }

    /// Shares with other origins what the policy lets them have.
    async fn share(&mut self, cors: &Cors, body: &mut Flow) -> Result<Filtered, Error> {
        match cors::decide(cors, self.head) {
            cors::Decision::Pass => {}
            cors::Decision::Mark(marks) => self.marks.extend(marks),
            cors::Decision::Answer(answer) => {
                *self.response = answer;
                self.told.details = "cors_response".into();
                self.answer(b"", body).await?;
                return Ok(Filtered::Answered);
            }
        }
        Ok(Filtered::Go)
    }

    /// Asks for tokens.
    async fn require(
        &mut self,
        jwt: &Jwt,
        setting: Option<&Setting>,
        body: &mut Flow,
    ) -> Result<Filtered, Error> {
        jwt::sanitize(jwt, self.head);
        if jwt.bypass_preflight && cors::is_preflight(self.head) {
            return Ok(Filtered::Go);
        }
        let requirement = match setting {
            Some(Setting::Jwt(name)) => jwt.named.iter().find(|(other, _)| other == name).map(|(_, it)| it),
            _ => {
                let mut dice = self.worker.dice.borrow_mut();
                let mut rules = jwt.rules.iter();
                rules.find(|(matches, _)| route::matches(matches, self.head, &mut dice)).map(|(_, it)| it)
            }
        };
        let Some(requirement) = requirement else { return Ok(Filtered::Go) };
        let mut failed = Vec::new();
        let verdict = loop {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            match jwt::check(jwt, requirement, self.head, now, &failed) {
                Outcome::NeedsKeys(provider) => {
                    if !self.fetch_keys(&jwt.providers[provider]).await {
                        failed.push(provider);
                    }
                }
                Outcome::Pass(good) => break Ok(good),
                Outcome::Refused(status) => break Err(status),
            }
        };
        match verdict {
            Ok(good) => {
                self.counters.jwt_allowed.inc();
                let mut found = Map::new();
                if jwt::apply(good, self.head, &mut found) {
                    self.find_route();
                }
                if !found.is_empty() {
                    self.metadata.insert("envoy.filters.http.jwt_authn".to_owned(), found.into());
                }
                Ok(Filtered::Go)
            }
            Err(status) => {
                self.counters.jwt_denied.inc();
                let words = status.words();
                self.told.flags.insert(Flags::UAEX);
                self.told.details = format!("jwt_authn_access_denied{{{}}}", words.replace(' ', "_")).into();
                let challenge = jwt::challenge(status, self.head);
                self.reply(status.http(), &[("www-authenticate", &challenge)], words.as_bytes(), body)
                    .await?;
                Ok(Filtered::Answered)
            }
        }
    }

    /// Fetches a provider's keys for all workers; whether there are some now.
    async fn fetch_keys(&self, provider: &Provider) -> bool {
        let Keys::Remote(remote) = &provider.keys else { return true };
        let mut head = RequestHead::build("GET", &remote.path, &remote.authority, &[]);
        head.version = Version::Http11;
        let asked = call::ask(self.worker, self.snapshot, &remote.cluster, &head, b"", remote.timeout).await;
        let keys = match asked {
            Ok(answer) if answer.head.status() == 200 => KeySet::parse(&answer.content),
            Ok(answer) => Err(format!("was answered with {}", answer.head.status())),
            Err(error) => Err(format!("cannot be had: {error}")),
        };
        match keys {
            Ok(keys) => {
                let until = Instant::now() + remote.lifetime;
                remote.known.store(Some(Arc::new((until, Arc::new(keys)))));
                true
            }
            Err(problem) => {
                warn!("the key set of {} at {}{} {problem}", provider.name, remote.authority, remote.path);
                false
            }
        }
    }
}
