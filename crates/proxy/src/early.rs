//! Protocols in which the server speaks first: while a client says nothing, the server that it would reach if it went on in
//! plain bytes is dialled. Whoever speaks first decides what the connection is.

use std::{
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tracing::debug;

use crate::{
    config::{FilterChain, listener::Terminal},
    context::Worker,
    downstream::Origin,
    tcp::{self, Server},
};

/// Clients that speak first have nearly always spoken by then, and cost no connection that they have no use for.
pub(crate) const QUIET: Duration = Duration::from_millis(5);

/// A server that is dialled before it is known whether it is wanted.
pub(crate) struct Early {
    /// What the connection is if it is plain bytes.
    origin: Rc<Origin>,
    state: State,
}

enum State {
    Dialling(Pin<Box<dyn Future<Output = Option<Server>>>>),
    Open(Box<Server>),
    /// There is no server, so that the client must speak.
    Failed,
}

impl Early {
    /// For a client that has been silent for [`QUIET`]. `None` where its bytes would not be passed on, or not without asking
    /// another service: it must speak.
    pub(crate) fn new(worker: &Rc<Worker>, origin: Origin) -> Option<Self> {
        let chain = &origin.chain;
        let passes = matches!(chain.terminal, Terminal::Tcp(_))
            && chain.tls.is_none()
            && chain.ask.is_none()
            && origin.would_pass();
        let origin = Rc::new(origin);
        passes.then(|| Self { state: State::Dialling(dial(worker.clone(), origin.clone())), origin })
    }

    /// Goes on while the client is silent; ready once the server has spoken, or has hung up.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            self.state = match &mut self.state {
                State::Dialling(dialling) => match dialling.as_mut().poll(cx) {
                    Poll::Ready(Some(server)) => State::Open(Box::new(server)),
                    Poll::Ready(None) => State::Failed,
                    Poll::Pending => return Poll::Pending,
                },
                State::Open(server) => return server.0.poll_fill(cx).map(|_| ()),
                State::Failed => return Poll::Pending,
            };
        }
    }

    /// Whether it leads where connections of this chain go.
    pub(crate) fn is_of(&self, chain: &Arc<FilterChain>) -> bool {
        Arc::ptr_eq(&self.origin.chain, chain)
    }

    /// The server, if it has been dialled and is there.
    pub(crate) async fn server(self) -> Option<Server> {
        match self.state {
            State::Dialling(dialling) => dialling.await,
            State::Open(server) => Some(*server),
            State::Failed => None,
        }
    }
}

fn dial(worker: Rc<Worker>, origin: Rc<Origin>) -> Pin<Box<dyn Future<Output = Option<Server>>>> {
    Box::pin(async move {
        let Terminal::Tcp(proxy) = &origin.chain.terminal else { return None };
        let dialled = tcp::connect(&worker, &origin, proxy, &mut None).await;
        let failed = |error: &_| debug!("no server for {}, which is silent: {error}", origin.source);
        dialled.inspect_err(failed).ok()
    })
}
