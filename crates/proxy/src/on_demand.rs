//! A request whose virtual host is not in hand: it asks for it and waits.
//!
//! A host that has the authority by its full name is right, whatever others there are. A wildcard or the catch-all may hide
//! one that is not in hand, unless that was asked before ([`Demand::known`](crate::config::demand::Demand::known)).

use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::{
    config::demand,
    error::Error,
    exchange::{Client, Deadlines},
    flow::Flow,
    route,
    story::Story,
    timer,
};

/// Requests wait a little longer for a virtual host than the control thread lets them.
const LONGEST_ASK: Duration = Duration::from_secs(6);

impl Story<'_> {
    /// Asks for the authority's virtual host if that may be one that is not in hand.
    pub(crate) fn question(&self) -> Option<oneshot::Receiver<()>> {
        let (demand, table) = match &self.found {
            Ok(found) => {
                let demand = found.table.demand.as_deref()?;
                demand::mark(&found.host.used);
                if found.exact {
                    return None;
                }
                (demand, found.table)
            }
            Err(_) => {
                let table = self.table()?;
                (table.demand.as_deref()?, table)
            }
        };
        let authority = route::looked_up(table, self.head.authority());
        if table.exact.contains_key(&*authority) { None } else { demand.ask(&authority) }
    }

    /// Waits for the virtual host that was asked for, or for the news that there is none, and goes on with what there is then.
    pub(crate) async fn wait_for_host(
        &mut self,
        answer: oneshot::Receiver<()>,
        body: &mut Flow,
    ) -> Result<(), Error> {
        let asked = Instant::now();
        let answered = async {
            // Without an answer what there is has to do.
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
            demand::mark(&found.host.used);
        }
        Ok(())
    }
}
