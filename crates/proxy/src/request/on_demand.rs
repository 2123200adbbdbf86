//! Virtual hosts that are loaded on demand: the request subscribes to its virtual host and waits for it.
//!
//! A virtual host with the exact authority applies at once. A wildcard or the catch-all may hide a virtual
//! host that is not loaded yet. They apply once the control plane has answered that the exact one does not
//! exist ([`Demand::known`](skysail_policy::state::demand::Demand::known)).
//!
//! Without an answer, the request is refused (503, flag `DU`): with `ALLOW_ANY`, a request to a host of the
//! mesh could otherwise leave in plain text. The exception is a table with
//! [`RouteTable::takes_unanswered`](skysail_policy::config::RouteTable::takes_unanswered), where wildcards
//! and the catch-all apply without an answer.

use std::time::{Duration, Instant};

use crate::{
    overload::limit_log::{self, Limit},
    request::{
        context::{Exchange, RequestDecision, RequestScope},
        routing,
        transfer::{Client, Deadlines},
    },
};
use skysail_http::{head::RequestHead, timer};
use skysail_policy::{
    error::{Error, Kind},
    route,
    state::demand::HostStatus,
};

/// Maximum wait for a virtual host; a little longer than the control thread's own limit.
const MAX_WAIT: Duration = Duration::from_secs(6);

/// Returns the discovery status of the request's virtual host; `Settled` if the route that was found applies.
pub(crate) fn host_status(
    scope: &RequestScope<'_>,
    head: &RequestHead,
    decision: &RequestDecision<'_>,
) -> HostStatus {
    let table = match &decision.found {
        Ok(found) if found.table.demand.is_none() => return HostStatus::Settled,
        Ok(found) => {
            found.host.used.mark();
            if found.exact {
                return HostStatus::Settled;
            }
            Some(found.table)
        }
        Err(_) => routing::table(scope),
    };
    let Some((table, demand)) = table.and_then(|table| Some((table, table.demand.as_deref()?))) else {
        return HostStatus::Settled;
    };
    let authority = route::lookup_key(table, head.authority());
    if table.exact.contains_key(&*authority) {
        return HostStatus::Settled;
    }
    match demand.status(&authority) {
        HostStatus::Unanswered if table.takes_unanswered => HostStatus::Settled,
        host_status => host_status,
    }
}

/// Waits for the virtual host if it has not been requested before, and finds the route again.
///
/// # Errors
/// The control plane has not answered, secrets of the virtual host are missing, or the client closes the connection.
pub(crate) async fn find_host<'a>(
    scope: &mut RequestScope<'a>,
    exchange: &mut Exchange<'_>,
    decision: &mut RequestDecision<'a>,
    before: HostStatus,
) -> Result<(), Error> {
    if before == HostStatus::Unknown {
        wait_for_host(scope, exchange, decision).await?;
        let takes_unanswered = routing::table(scope).is_some_and(|table| table.takes_unanswered);
        if takes_unanswered || host_status(scope, exchange.request, decision) == HostStatus::Settled {
            return Ok(());
        }
    }
    scope.counters.on_demand_refused.inc();
    let (host, manager) = (exchange.request.authority(), &scope.manager.stat_prefix);
    limit_log::log(Limit::Discovery, format_args!("{manager}, host {host:?}"));
    let secrets = routing::table(scope).and_then(|table| {
        table.demand.as_deref()?.missing_secrets(&route::lookup_key(table, exchange.request.authority()))
    });
    Err(Error::new(secrets.map_or(Kind::HostUnanswered, Kind::SecretsMissing)))
}

async fn wait_for_host<'a>(
    scope: &mut RequestScope<'a>,
    exchange: &mut Exchange<'_>,
    decision: &mut RequestDecision<'a>,
) -> Result<(), Error> {
    let answer = routing::table(scope).and_then(|table| {
        Some(table.demand.as_deref()?.request(&route::lookup_key(table, exchange.request.authority())))
    });
    let Some(answer) = answer else { return Ok(()) };
    let begun = Instant::now();
    let answered = async {
        let _ = timer::timeout(MAX_WAIT, answer).await;
        Ok(())
    };
    let mut deadlines = Deadlines::default();
    let waited =
        Client::new(exchange.downstream, &mut deadlines, &mut exchange.body, false).wait(answered).await;
    scope.counters.on_demand.inc();
    let micros = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
    scope.counters.on_demand_micros.add(micros);
    waited?;
    scope.snapshot = scope.renewed.get_or_init(|| scope.worker.snapshot());
    routing::find_route(scope, exchange.request, None, decision);
    if let Ok(found) = &decision.found {
        found.host.used.mark();
    }
    Ok(())
}
