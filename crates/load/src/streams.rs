//! The engine for HTTP/2 and gRPC: many streams on one thread. Each stream has at most one request in progress.

mod connection;
mod timer;

use std::{cell::RefCell, fmt::Display, ops::Range, rc::Rc, sync::Arc, time::Duration};

use anyhow::bail;
use bytes::Bytes;
use tokio::{
    task::{JoinSet, LocalSet},
    time::{MissedTickBehavior, interval, sleep, timeout},
};

use self::{connection::SharedConnection, timer::Timer};
use crate::{
    args::LoadArgs,
    clock, grpc,
    pace::Pace,
    tally::{Failure, Outcome, Tally, Times},
    target::{Protocol, Target},
    window::Window,
    worker::{Interval, Shared, nanoseconds},
};

/// Interval at which results are reported and the end of the load is checked.
const LOOK: Duration = Duration::from_millis(50);

/// State that all streams of a thread share.
struct Thread {
    args: LoadArgs,
    target: Target,
    shared: Arc<Shared>,
    timer: Timer,
    tally: RefCell<Tally>,
    interval: RefCell<Interval>,
    /// Body of the requests: the payload, or a gRPC message with its prefix.
    body: Bytes,
}

/// One sender of requests.
struct Sender {
    thread: Rc<Thread>,
    connection: Rc<SharedConnection>,
    pace: Pace,
    /// Start of the load; 0 before it.
    start: u64,
    is_busy: bool,
}

/// Sends the requests of the connections with these indices. Returns the results when all have ended. With a window, only
/// requests that are due in it count.
pub(crate) fn run(
    args: &LoadArgs,
    target: &Target,
    shared: &Arc<Shared>,
    indices: Range<u64>,
    window: Option<&mut Window<'_>>,
) -> anyhow::Result<Tally> {
    let prepare = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let local = LocalSet::new();
        let prepared = local.block_on(&runtime, warm_up(args, target, shared, indices))?;
        anyhow::Ok((runtime, local, prepared))
    };
    let prepared = prepare();
    if prepared.is_err() {
        shared.stop();
    }
    let start = shared.wait_ready();
    let (runtime, local, (thread, senders)) = prepared?;
    let cpu = clock::thread_cpu();
    local.block_on(&runtime, send(&thread, senders, start, window)).inspect_err(|_| shared.stop())?;
    drop(local);
    let mut tally = thread.tally.replace(Tally::new()?);
    tally.cpu = clock::thread_cpu() - cpu;
    Ok(tally)
}

/// Opens all connections and sends one request over each.
async fn warm_up(
    args: &LoadArgs,
    target: &Target,
    shared: &Arc<Shared>,
    indices: Range<u64>,
) -> anyhow::Result<(Rc<Thread>, Vec<Sender>)> {
    let body = match target.protocol {
        Protocol::Grpc => grpc::message(args, &target.payload),
        _ => target.payload.clone().into(),
    };
    let thread = Rc::new(Thread {
        args: args.clone(),
        target: target.clone(),
        shared: Arc::clone(shared),
        timer: Timer::start()?,
        tally: RefCell::new(Tally::new()?),
        interval: RefCell::new(shared.empty_interval()),
        body,
    });
    let streams = u64::from(args.streams);
    let settings = args.pace(u64::from(args.connections) * streams);
    let mut senders = Vec::new();
    for index in indices {
        // By the user, or because a request of another thread failed, whose error counts.
        if shared.is_stopped() {
            break;
        }
        let connection = Rc::new(SharedConnection::new(args));
        let (outcome, _) = exchange(&thread, &connection).await;
        if !outcome.is_success() && !args.allow_initial_errors {
            let reason = thread.tally.borrow().reason(outcome);
            bail!("the first request to {} {reason}; -allow-initial-errors begins anyway", target.url);
        }
        senders.extend((0..streams).map(|stream| Sender {
            thread: Rc::clone(&thread),
            connection: Rc::clone(&connection),
            pace: settings.of_connection(index * streams + stream),
            start: 0,
            is_busy: false,
        }));
    }
    Ok((thread, senders))
}

/// Runs all senders, and the window, to their end.
async fn send(
    thread: &Rc<Thread>,
    senders: Vec<Sender>,
    start: u64,
    mut window: Option<&mut Window<'_>>,
) -> anyhow::Result<()> {
    if let Some(window) = &window {
        thread.tally.borrow_mut().first = start + window.begin();
    }
    let mut connections: Vec<Rc<SharedConnection>> = Vec::new();
    for sender in &senders {
        if !connections.last().is_some_and(|last| Rc::ptr_eq(last, &sender.connection)) {
            connections.push(Rc::clone(&sender.connection));
        }
    }
    let mut tasks = JoinSet::new();
    for sender in senders {
        tasks.spawn_local(sender.run(start));
    }
    let duration = thread.args.duration().map_or(u64::MAX, nanoseconds);
    let give_up = start.saturating_add(duration).saturating_add(nanoseconds(thread.args.timeout));
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let boundary = window.as_ref().and_then(|window| window.next());
        if tasks.is_empty() && boundary.is_none() {
            break;
        }
        let boundary = start.saturating_add(boundary.unwrap_or(u64::MAX));
        let until_boundary = Duration::from_nanos(boundary.saturating_sub(clock::now()));
        tokio::select! {
            Some(ended) = tasks.join_next() => ended?,
            () = sleep(until_boundary) => {}
            _ = look.tick() => {
                thread.shared.report(&mut thread.interval.borrow_mut());
                if thread.shared.is_stopped() || clock::now() >= give_up {
                    break;
                }
            }
        }
        if let Some(window) = &mut window {
            window.pass(clock::now().saturating_sub(start), &mut thread.tally.borrow_mut());
        }
    }
    // Senders that have not ended count their unsent requests when they are dropped.
    tasks.shutdown().await;
    thread.shared.report(&mut thread.interval.borrow_mut());
    let mut tally = thread.tally.borrow_mut();
    tally.sockets = connections.iter().map(|connection| connection.sockets()).collect();
    Ok(())
}

impl Thread {
    /// Keeps the error of a failure for the result. Returns the failure.
    fn failed(&self, failure: Failure, error: &dyn Display) -> Failure {
        self.tally.borrow_mut().note(failure, error);
        failure
    }
}

impl Sender {
    /// Sends requests until none is due any more.
    async fn run(mut self, start: u64) {
        self.start = start;
        let (thread, mut rng) = (Rc::clone(&self.thread), fastrand::Rng::new());
        while !thread.shared.is_stopped() {
            let now = clock::now();
            let Some(due) = self.pace.next(now.saturating_sub(start), &mut rng) else { break };
            let due = start + due;
            if due > now {
                thread.timer.until(due).await;
                thread.tally.borrow_mut().record_lateness(due, clock::now());
            }
            let sent = clock::now();
            self.is_busy = true;
            let (outcome, size) = exchange(&thread, &self.connection).await;
            self.is_busy = false;
            let ended = clock::now();
            let due = if thread.args.from_sent || !self.pace.is_open_loop() { sent } else { due };
            let mut tally = thread.tally.borrow_mut();
            tally.record(outcome, Times { due, sent, ended });
            if let Some(size) = size {
                tally.record_size(0, size);
            }
            thread.interval.borrow_mut().record(ended.saturating_sub(due), outcome.is_success());
            thread.shared.check_abort(outcome);
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if self.start == 0 {
            return;
        }
        let mut tally = self.thread.tally.borrow_mut();
        tally.skipped += self.pace.skipped;
        tally.unsent += self.pace.left_before(clock::now().saturating_sub(self.start));
        // If the load was ended early, requests in progress do not count.
        tally.unsent += u64::from(self.is_busy && !self.thread.shared.is_stopped());
    }
}

/// Sends a request. Returns its outcome, and the bytes of the response's body.
async fn exchange(thread: &Thread, connection: &SharedConnection) -> (Outcome, Option<u64>) {
    match timeout(thread.args.timeout, connection.exchange(thread)).await {
        Ok(Ok((outcome, size))) => (outcome, Some(size)),
        Ok(Err(failure)) => (Outcome::Failed(failure), None),
        Err(_) => {
            connection.discard(connection.sockets());
            (Outcome::Failed(Failure::Timeout), None)
        }
    }
}
