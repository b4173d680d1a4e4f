export function useEffect(effect: () => void | (() => void), inputs?: unknown[]): void;
export function useMemo<T>(make: () => T, inputs: unknown[]): T;
export function useRef<T>(initial: T): {current: T};
export function useState(initial: null): [any, (next: any) => void];
export function useState<T>(initial: T | (() => T)): [T, (next: T | ((before: T) => T)) => void];
