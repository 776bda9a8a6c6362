package io.persistshard.spark;

import java.lang.ref.Cleaner;
import java.util.UUID;

/**
 * A table or a scan that the catalog's process keeps readable. Everything that reads it refers to this object: tables, scans, plans, caches
 * and RDDs. When the garbage collector finds no more references, the process releases the frame.
 */
final class Frame {
  private static final Cleaner CLEANER = Cleaner.create();

  final Desk desk;
  final String name;

  /** A frame that was not requested yet. Releasing a frame twice, or one that was never loaded, does no harm. */
  Frame(Desk desk) {
    this(desk, UUID.randomUUID().toString());
  }

  /** A frame that the process has loaded under this name. */
  Frame(Desk desk, String name) {
    this.desk = desk;
    this.name = name;
    CLEANER.register(this, new Release(desk, name));
  }

  /** Must not refer to the frame itself. Otherwise the frame would live for ever. */
  private record Release(Desk desk, String name) implements Runnable {
    @Override
    public void run() {
      desk.dropFrame(name);
    }
  }
}
