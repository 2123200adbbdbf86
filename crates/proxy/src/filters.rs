//! The filters between the connection manager and the router, each in its turn, in the order of the configuration.

use std::sync::Arc;

use crate::{
    config::{
        http::{Does, Filter},
        policy::Policy,
        route::{Cors, Fault, Setting},
    },
    cors,
    error::{Error, Flags, Kind},
    exchange::Deadlines,
    fault,
    flow::Flow,
    policy::{self, Subject, Tally, Verdict},
    story::Story,
};

/// What the filters make of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filtered {
    /// It goes on.
    Go,
    /// The answer's head is in `response`, which is all there is to it.
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
            (Does::Cors, Some(Setting::Cors(cors))) if self.leads_on() => return Ok(self.share(cors)),
            (Does::Cors, _) => {}
        }
        Ok(Filtered::Go)
    }

    fn authorize(&self, policy: &Arc<Policy>) -> Result<(), Error> {
        let origin = &self.downstream.origin;
        let subject = Subject {
            head: Some(self.head),
            peer: &origin.peer,
            source: origin.source,
            remote: self.client,
            destination: origin.destination,
            server_name: origin.server_name(),
        };
        let mut tally = Tally::default();
        let verdict = policy::check(std::slice::from_ref(policy), &subject, &mut tally);
        let counters = self.counters;
        counters.rbac_allowed.add(tally.allowed.into());
        counters.rbac_denied.add(tally.denied.into());
        counters.rbac_shadow_allowed.add(tally.shadow_allowed.into());
        counters.rbac_shadow_denied.add(tally.shadow_denied.into());
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
    fn share(&mut self, cors: &Cors) -> Filtered {
        match cors::decide(cors, self.head) {
            cors::Decision::Pass => {}
            cors::Decision::Mark(marks) => self.marks.extend(marks),
            cors::Decision::Answer(answer) => {
                *self.response = answer;
                self.told.details = "cors_response".into();
                return Filtered::Answered;
            }
        }
        Filtered::Go
    }
}
