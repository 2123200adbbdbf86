//! Shutdown in two steps: *drain* (accept no new work, finish what runs) and *stop*.
//!
//! One [`Trigger`] signals any number of [`Shutdown`] handles. A task that must finish before the process may exit
//! holds a [`Guard`]; [`Trigger::drained`] waits for the last of them.

use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
};

/// Sender side: starts the drain and waits for its end.
#[derive(Debug)]
pub struct Trigger {
    draining: watch::Sender<bool>,
    guards: mpsc::Receiver<()>,
    /// Sender that guards are cloned from until the drain starts.
    guard: Option<mpsc::Sender<()>>,
}

/// Receiver side: tells a task when the drain begins. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Shutdown {
    draining: watch::Receiver<bool>,
    guard: mpsc::WeakSender<()>,
}

/// Guard of work that must finish before the process exits.
#[derive(Clone, Debug)]
pub struct Guard {
    _held: Option<mpsc::Sender<()>>,
}

/// Creates a trigger and the first of its handles.
pub fn channel() -> (Trigger, Shutdown) {
    let (draining, watching) = watch::channel(false);
    let (guard, guards) = mpsc::channel(1);
    let shutdown = Shutdown { draining: watching, guard: guard.downgrade() };
    (Trigger { draining, guards, guard: Some(guard) }, shutdown)
}

impl Trigger {
    /// Signals every handle to drain.
    pub fn drain(&mut self) {
        self.guard = None;
        self.draining.send_replace(true);
    }

    /// Waits until every guard is dropped. Call [`Self::drain`] first.
    pub async fn drained(&mut self) {
        while self.guards.recv().await.is_some() {}
    }
}

impl Shutdown {
    /// Returns whether the drain has begun.
    pub fn is_draining(&self) -> bool {
        *self.draining.borrow()
    }

    /// Waits for the drain to begin; also returns when the trigger is dropped.
    pub async fn draining(&mut self) {
        let _ = self.draining.wait_for(|draining| *draining).await;
    }

    /// Returns a guard that delays the exit until it is dropped.
    ///
    /// Once the drain has begun and all other guards are dropped, [`Trigger::drained`] has ended. A guard that is
    /// requested afterwards has no effect: nothing waits for work that begins so late.
    pub fn guard(&self) -> Guard {
        Guard { _held: self.guard.upgrade() }
    }
}

/// Waits for SIGTERM or SIGINT and returns its name.
///
/// # Errors
/// Fails if the process may not install signal handlers.
pub async fn terminate() -> std::io::Result<&'static str> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(tokio::select! {
        _ = term.recv() => "SIGTERM",
        _ = int.recv() => "SIGINT",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_drain_waits_for_the_last_guard() {
        let (mut trigger, shutdown) = channel();
        let mut other = shutdown.clone();
        let guard = shutdown.guard();
        assert!(!shutdown.is_draining());
        trigger.drain();
        other.draining().await;
        let drained = tokio::spawn(async move { trigger.drained().await });
        tokio::task::yield_now().await;
        assert!(!drained.is_finished());
        drop(guard);
        drained.await.unwrap();
    }
}
