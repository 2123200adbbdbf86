//! Writes access logs to files, and exports logs and spans to collectors. Each worker has one task per collector, which
//! sends batches.
//!
//! A batch is sent when it reaches its size, when its interval has passed, and at the end of the worker. One batch is
//! in flight at a time, while the next one grows up to a limit. A batch that has not left the sidecar is sent again,
//! each time after a longer pause. A batch that the collector may have is dropped, because a retry could deliver it
//! twice.

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

/// Time without items after which the state of a collector is dropped.
const IDLE: Duration = Duration::from_secs(300);

/// Writes a finished request or connection to the access logs whose filters it passes.
pub(crate) fn log(worker: &Rc<Worker>, logs: &[Arc<AccessLog>], context: &Context<'_>) {
    for log in logs {
        let passes = |filter| filter::passes(filter, context, &mut worker.rng.borrow_mut());
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

/// Adds an item to the next batch of a collector. `write` appends the item: a value of the envelope's field with its
/// key and length, or a JSON value and a comma.
pub(crate) fn export(worker: &Rc<Worker>, collector: &Arc<Collector>, write: impl FnOnce(&mut Vec<u8>)) {
    let (exporter, new) = worker.exporters.of(collector, &worker.shard);
    exporter.add(write);
    if new {
        tokio::task::spawn_local(send(worker.clone(), exporter));
    }
}

/// Sends all batches that wait, for at most `timeout`.
pub(crate) async fn finish(exporters: &Exporters, timeout: Duration) {
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
    timer::timeout(timeout, done).await;
}

/// Removes an exporter when its task ends, so that the next item creates a new exporter and a new task.
struct RemoveOnDrop<'a>(&'a Exporters, &'a Rc<Exporter>);

impl Drop for RemoveOnDrop<'_> {
    fn drop(&mut self) {
        self.0.remove(self.1);
    }
}

/// Sends the batches of a collector until no item has been added for [`IDLE`].
async fn send(worker: Rc<Worker>, exporter: Rc<Exporter>) {
    let _remove = RemoveOnDrop(&worker.exporters, &exporter);
    let mut stream = None;
    loop {
        if exporter.is_empty() && timer::timeout(IDLE, exporter.some.notified()).await.is_none() {
            return;
        }
        if !exporter.ending.get() {
            timer::timeout(exporter.interval(), exporter.now.notified()).await;
        }
        let batch = exporter.take();
        if batch.count > 0 {
            match send_batch(&worker, &exporter, &batch.items, &mut stream).await {
                Ok(()) => exporter.sent(batch.count),
                Err(error) if has_not_left(&error.kind) => exporter.put_back(batch, &reason(&error)),
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
///
/// # Errors
/// The call fails, or the collector rejects a part of the batch.
async fn send_batch(
    worker: &Rc<Worker>,
    exporter: &Exporter,
    items: &[u8],
    stream: &mut Option<call::CallStream>,
) -> Result<(), Error> {
    let collector = &*exporter.collector;
    let content = |first| collector.envelope.wrap(items, first);
    let grpc_head = |path| {
        let mut head = call::grpc_head(path, &collector.authority);
        add_fields(&mut head, collector);
        head
    };
    let snapshot = worker.snapshot();
    let post = |head: RequestHead, content: Vec<u8>| {
        let snapshot = &*snapshot;
        async move {
            call::send_request(worker, snapshot, &collector.cluster, &head, &content, collector.timeout).await
        }
    };
    match &collector.call {
        Call::Unary(path) => {
            let answer = post(grpc_head(path), call::grpc_frame(&content(true))).await?;
            check_accepted(call::grpc_message(&answer)?)
        }
        Call::Post { path, content_type } => {
            let fields = [("content-type", *content_type)];
            let mut head = RequestHead::build("POST", path, &collector.authority, &fields);
            add_fields(&mut head, collector);
            match post(head, content(true)).await?.head.status() {
                200..300 => Ok(()),
                status => Err(Error::caused(Kind::UpstreamProtocol, format_args!("HTTP status {status}"))),
            }
        }
        Call::Stream(path) => {
            let usable = stream.as_mut().is_some_and(|open| open.is_open() && open.is_current(worker));
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
            sent.unwrap_or_else(|| Err(Error::caused(Kind::ResponseTimeout, "the collector does not read")))?;
            *stream = Some(open);
            Ok(())
        }
    }
}

/// Returns whether an error means that the collector has not received the batch.
fn has_not_left(kind: &Kind) -> bool {
    matches!(
        kind,
        Kind::ClusterNotFound(_)
            | Kind::NoHealthyUpstream
            | Kind::DnsFailed
            | Kind::ConnectFailed
            | Kind::ConnectTimeout
            | Kind::UpstreamRefused
            | Kind::Overflow
    )
}

fn reason(error: &Error) -> String {
    match &error.cause {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

fn add_fields(head: &mut RequestHead, collector: &Collector) {
    for (name, value) in &collector.headers {
        head.append(name, value.as_bytes());
    }
}

/// Checks an OpenTelemetry response.
///
/// # Errors
/// The collector rejected a part of the batch.
fn check_accepted(message: &[u8]) -> Result<(), Error> {
    let response = ExportResponse::from_slice(message);
    let partial = response.ok().and_then(|response| response.partial_success);
    match partial.filter(|partial| partial.rejected > 0) {
        None => Ok(()),
        Some(partial) => {
            // The text is escaped and cut, so that a collector cannot forge log lines.
            let text: String = partial.error_message.chars().take(200).flat_map(char::escape_debug).collect();
            let why = format_args!("the collector rejected {} items: {text}", partial.rejected);
            Err(Error::caused(Kind::UpstreamProtocol, why))
        }
    }
}
