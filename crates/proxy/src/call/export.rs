//! What is told of requests goes to files and to collectors; to these in batches, each collector by a task of its own on each worker.
//!
//! A batch goes when it is large enough, when its time has come, and at the end of the worker. One is on its way at a time;
//! meanwhile the next one grows as far as it may. A batch that does not get there is lost: who
//! sends it again may tell it twice.

use std::{rc::Rc, sync::Arc, time::Duration};

use skysail_proto::Codec as _;
use skysail_proto::otlp::ExportResponse;

use crate::{
    call,
    telemetry::{
        self,
        export::{Exporter, Exporters},
        filter,
    },
    worker::Worker,
};
use skysail_http::{head::RequestHead, timer};
use skysail_policy::{
    config::{
        collector::{Call, Collector},
        http::{AccessLog, LogTarget},
    },
    error::{Error, Kind},
    record::Context,
};

/// What nothing is told to for so long is forgotten.
const IDLE: Duration = Duration::from_secs(300);

/// Tells of a finished request or connection where it is to be logged.
pub(crate) fn log(worker: &Rc<Worker>, logs: &[Arc<AccessLog>], context: &Context<'_>) {
    for log in logs {
        let passes = |filter| filter::passes(filter, context, &mut worker.dice.borrow_mut());
        if !log.filter.as_ref().is_none_or(passes) {
            continue;
        }
        match &log.to {
            LogTarget::File { path, format } => {
                if let Some(writer) = &worker.log {
                    writer.log(path, format, context);
                }
            }
            LogTarget::Entries { collector, http } => {
                export(worker, collector, |items| telemetry::entry(http.as_ref(), context, items));
            }
            LogTarget::Records { collector, body, attributes } => {
                export(worker, collector, |items| {
                    telemetry::log_record(body.as_ref(), attributes, context, items);
                });
            }
        }
    }
}

/// Adds an item, written by `write`, to what is told to a collector: a value of the envelope's field, with its key
/// and length, or a JSON value and a comma.
pub(crate) fn export(worker: &Rc<Worker>, collector: &Arc<Collector>, write: impl FnOnce(&mut Vec<u8>)) {
    let (exporter, new) = worker.exporters.of(collector, &worker.shard);
    exporter.add(write);
    if new {
        tokio::task::spawn_local(send(worker.clone(), exporter));
    }
}

/// Sends all that waits, for at most so long.
pub(crate) async fn finish(exporters: &Exporters, patience: Duration) {
    let all = exporters.all();
    for exporter in &all {
        exporter.ending.set(true);
        exporter.some.notify_one();
        exporter.now.notify_one();
    }
    let done = async {
        for exporter in &all {
            while !exporter.finished.get() {
                exporter.done.notified().await;
            }
        }
    };
    timer::timeout(patience, done).await;
}

/// Forgets a batch in the end, so that who comes next makes another, with a task that sends it.
struct Forget<'a>(&'a Exporters, &'a Rc<Exporter>);

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.0.remove(self.1);
    }
}

async fn send(worker: Rc<Worker>, exporter: Rc<Exporter>) {
    let _forget = Forget(&worker.exporters, &exporter);
    let mut stream = None;
    loop {
        if exporter.is_empty() && timer::timeout(IDLE, exporter.some.notified()).await.is_none() {
            return;
        }
        if !exporter.ending.get() {
            timer::timeout(exporter.collector.interval, exporter.now.notified()).await;
        }
        let batch = exporter.take();
        if batch.count > 0 {
            match deliver(&worker, &exporter, &batch.items, &mut stream).await {
                Ok(()) => exporter.sent(batch.count),
                Err(error) => exporter.failed(batch.count, &reason(&error)),
            }
        }
        if exporter.ending.get() && exporter.is_empty() {
            if let Some(stream) = stream.take() {
                stream.finish().await;
            }
            exporter.finished.set(true);
            exporter.done.notify_one();
        }
    }
}

/// Sends a batch.
async fn deliver(
    worker: &Rc<Worker>,
    exporter: &Exporter,
    items: &[u8],
    stream: &mut Option<call::CallStream>,
) -> Result<(), Error> {
    let collector = &*exporter.collector;
    let content = |first| collector.envelope.wrap(items, first);
    let grpc_head = |path| {
        let mut head = call::grpc_head(path, &collector.authority);
        add(&mut head, collector);
        head
    };
    let snapshot = worker.snapshot();
    let ask = |head: RequestHead, content: Vec<u8>| {
        let snapshot = &*snapshot;
        async move { call::ask(worker, snapshot, &collector.cluster, &head, &content, collector.timeout).await }
    };
    match &collector.call {
        Call::Unary(path) => {
            let answer = ask(grpc_head(path), call::grpc_frame(&content(true))).await?;
            taken(call::grpc_message(&answer)?)
        }
        Call::Post { path, content_type } => {
            let fields = [("content-type", *content_type)];
            let mut head = RequestHead::build("POST", path, &collector.authority, &fields);
            add(&mut head, collector);
            match ask(head, content(true)).await?.head.status() {
                200..300 => Ok(()),
                status => Err(Error::caused(Kind::UpstreamProtocol, format_args!("HTTP status {status}"))),
            }
        }
        Call::Stream(path) => {
            let usable = stream.as_mut().is_some_and(|open| open.is_open() && open.is_wanted(worker));
            let mut open = match stream.take() {
                Some(open) if usable => open,
                old => {
                    old.map(|old| tokio::task::spawn_local(timer::timeout(collector.timeout, old.finish())));
                    let head = grpc_head(path);
                    let open = call::CallStream::open(worker, &snapshot, &collector.cluster, &head);
                    let open = timer::timeout(collector.timeout, open).await;
                    open.unwrap_or_else(|| Err(Error::new(Kind::ConnectTimeout)))?
                }
            };
            let frame = call::grpc_frame(&content(open.is_new()));
            let sent = timer::timeout(collector.timeout, open.send(&frame)).await;
            sent.unwrap_or_else(|| Err(Error::caused(Kind::ResponseTimeout, "it reads nothing")))?;
            *stream = Some(open);
            Ok(())
        }
    }
}

fn reason(error: &Error) -> String {
    match &error.cause {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

fn add(head: &mut RequestHead, collector: &Collector) {
    for (name, value) in &collector.headers {
        head.append(name, value.as_bytes());
    }
}

/// Whether all of a batch was taken, as an answer of OpenTelemetry says.
fn taken(message: &[u8]) -> Result<(), Error> {
    let response = ExportResponse::from_slice(message);
    let partial = response.ok().and_then(|response| response.partial_success);
    match partial.filter(|partial| partial.rejected > 0) {
        None => Ok(()),
        Some(partial) => {
            // Others may write anything into it, but not lines of our log.
            let said: String = partial.error_message.chars().take(200).flat_map(char::escape_debug).collect();
            let why = format_args!("it refused {} of them: {said}", partial.rejected);
            Err(Error::caused(Kind::UpstreamProtocol, why))
        }
    }
}
