//! Requests whose virtual host is not in force: they ask for it and wait.
//!
//! A virtual host that has the authority by its full name is right, whatever others there are. A wildcard or the catch-all
//! may hide one that is not in force, so they apply only once the control plane has answered that there is none
//! ([`Demand::known`](skysail_policy::state::demand::Demand::known)).
//! Without an answer the request is refused (503, flag `DU`), unless the table says that its
//! wildcards and catch-all apply then, too ([`RouteTable::takes_unanswered`](skysail_policy::config::RouteTable::takes_unanswered)):
//! with `ALLOW_ANY` the request would leave in plain text although its host may be one of the mesh.

use std::time::{Duration, Instant};

use crate::{
    overload::limit_log::{self, Limit},
    request::{
        exchange::{Client, Deadlines},
        story::RequestContext,
    },
};
use skysail_http::{flow::Flow, timer};
use skysail_policy::{
    error::{Error, Kind},
    route,
    state::demand::Standing,
};

/// Requests wait a little longer for a virtual host than the control thread lets them.
const LONGEST_ASK: Duration = Duration::from_secs(6);

impl RequestContext<'_> {
    /// Returns what is known of the request's virtual host; `Settled` if the route that was found applies.
    pub(crate) fn standing(&self) -> Standing {
        let table = match &self.found {
            Ok(found) if found.table.demand.is_none() => return Standing::Settled,
            Ok(found) => {
                found.host.used.mark();
                if found.exact {
                    return Standing::Settled;
                }
                Some(found.table)
            }
            Err(_) => self.table(),
        };
        let Some((table, demand)) = table.and_then(|table| Some((table, table.demand.as_deref()?))) else {
            return Standing::Settled;
        };
        let authority = route::looked_up(table, self.head.authority());
        if table.exact.contains_key(&*authority) {
            return Standing::Settled;
        }
        match demand.standing(&authority) {
            Standing::Unanswered if table.takes_unanswered => Standing::Settled,
            standing => standing,
        }
    }

    /// Waits for the virtual host if nobody has asked for it yet, and continues with what there is then.
    ///
    /// # Errors
    /// The control plane does not answer, or the client goes away.
    pub(crate) async fn find_host(&mut self, standing: Standing, body: &mut Flow) -> Result<(), Error> {
        if standing == Standing::Unknown {
            self.wait_for_host(body).await?;
            let takes_unanswered = self.table().is_some_and(|table| table.takes_unanswered);
            if takes_unanswered || self.standing() == Standing::Settled {
                return Ok(());
            }
        }
        self.counters.on_demand_refused.inc();
        let (host, place) = (self.head.authority(), &self.manager.stat_prefix);
        limit_log::tell(Limit::Discovery, format_args!("{place}, host {host:?}"));
        Err(Error::new(Kind::HostUnanswered))
    }

    async fn wait_for_host(&mut self, body: &mut Flow) -> Result<(), Error> {
        let answer = self.table().and_then(|table| {
            Some(table.demand.as_deref()?.ask(&route::looked_up(table, self.head.authority())))
        });
        let Some(answer) = answer else { return Ok(()) };
        let asked = Instant::now();
        let answered = async {
            let _ = timer::timeout(LONGEST_ASK, answer).await;
            Ok(())
        };
        let mut deadlines = Deadlines::default();
        let waited = Client::new(self.downstream, &mut deadlines, body, false).wait(answered).await;
        self.counters.on_demand.inc();
        let micros = u64::try_from(asked.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.counters.on_demand_micros.add(micros);
        waited?;
        self.snapshot = self.renewed.get_or_init(|| self.worker.snapshot());
        self.find_route();
        if let Ok(found) = &self.found {
            found.host.used.mark();
        }
        Ok(())
    }
}
